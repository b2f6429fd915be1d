"""Times of attention, norms, rotary embeddings, gated layers and convolutions as exported and fused, on one device.

    python -m tests.benchmarks.fused_attention --device cpu
    python -m tests.benchmarks.fused_attention --device cuda
    python -m tests.benchmarks.fused_attention --device cuda --bfloat16

Two attentions with their projections, or eight of the other operators, in ONNX Runtime alone. Prints a line for each
shape, and the largest difference. With --bfloat16, half precision is bfloat16, with casts of inputs and outputs. The
table in `splitc.compiler.patterns.kernels` is based on this, and so is what is fused in engines for GPUs
(`splitc.compiler.engine_graphs.gpu_fusions`).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
from onnx import TensorProto
from onnx.helper import make_node

from splitc.compiler.analysis.facts import analyze
from splitc.compiler.engine_graphs.gpu_functions import functions_of
from splitc.compiler.engine_graphs.gpu_fusions import fuse_for_gpus
from splitc.compiler.fusion.fuse import fuse
from splitc.compiler.operators.gpu_kernels import HALVES as HALF_TYPES
from splitc.compiler.patterns.kernels import Gains
from splitc.compiler.request.shapes import AskedShapes
from splitc.runtime.cli.terminal import out, table
from splitc.runtime.engines.onnx_session import open_onnx
from tests.helpers.written_attention import Form, Size, feeds, write

HALF = TensorProto.FLOAT16
TYPES = frozenset({ir.DataType.FLOAT, *HALF_TYPES})
ALL = Gains(TYPES, parts=TYPES, modulations=TYPES, divided=TYPES)
# Cases: their names, how attention is written, and the sizes.
CPU = [
    ("BERT, 128", Form(bias="mask"), Size(1, 128, 128, 12, 64)),
    ("BERT, 512", Form(bias="mask"), Size(1, 512, 512, 12, 64)),
    ("ViT, 197", Form(scale="split"), Size(1, 197, 197, 12, 64)),
    ("U-Net, 1024", Form(), Size(2, 1024, 1024, 5, 64)),
    ("U-Net, 1024 to 77", Form(), Size(2, 1024, 77, 5, 64)),
    ("Whisper, 1500", Form(scale="split"), Size(1, 1500, 1500, 8, 64)),
    ("long, 4096", Form(), Size(1, 4096, 4096, 4, 64)),
    ("token, 2000", Form(scale="split", bias="mask", keys="cache"), Size(1, 1, 2000, 12, 64)),
    ("prompt, 256", Form(scale="split", bias="mask", keys="cache", guard=True), Size(1, 256, 256, 12, 64)),
    ("T5, 256", Form(scale="none", bias="both"), Size(1, 256, 256, 8, 64)),
]
CUDA = [
    ("BERT-large, 8 x 512", Form(bias="mask", dtype=HALF), Size(8, 512, 512, 16, 64)),
    ("BERT-large, a row of a mask", Form(bias="row", dtype=HALF), Size(8, 512, 512, 16, 64)),
    ("BERT-large, single precision", Form(bias="mask"), Size(8, 512, 512, 16, 64)),
    ("ViT-H, 257", Form(scale="split", dtype=HALF), Size(1, 257, 257, 16, 80)),
    ("SDXL, 4096", Form(dtype=HALF), Size(2, 4096, 4096, 10, 64)),
    ("SDXL, 1024", Form(dtype=HALF), Size(2, 1024, 1024, 20, 64)),
    ("SDXL, 1024 to 77", Form(dtype=HALF), Size(2, 1024, 77, 20, 64)),
    ("SDXL, 4096, single precision", Form(), Size(2, 4096, 4096, 10, 64)),
    ("Flux, 4608", Form(scale="split", dtype=HALF), Size(1, 4608, 4608, 24, 128)),
    ("Flux, keys kept", Form(scale="split", keys="cache", dtype=HALF), Size(1, 4608, 4608, 24, 128)),
    ("Whisper-large, 1500", Form(scale="split", dtype=HALF), Size(1, 1500, 1500, 20, 64)),
    ("Softmax in single precision", Form(bias="mask", wide_softmax=True, dtype=HALF), Size(1, 1024, 1024, 16, 128)),
    ("token, 2000", Form(scale="split", bias="mask", keys="cache", dtype=HALF), Size(1, 1, 2000, 32, 128)),
    ("token, 2000, groups of 4", Form(bias="mask", keys="cache", groups=4, dtype=HALF), Size(1, 1, 2000, 32, 128)),
    ("prompt, 512", Form(scale="split", bias="mask", keys="cache", guard=True, dtype=HALF), Size(1, 512, 512, 32, 128)),
    ("T5, 512", Form(scale="none", bias="both", dtype=HALF), Size(1, 512, 512, 16, 64)),
    ("heads in the batch, 1024", Form(layout="rows", dtype=HALF), Size(4, 1024, 1024, 16, 64)),
    ("heads in the batch, a Where mask", Form(layout="merged", bias="where", dtype=HALF), Size(4, 1024, 1024, 16, 64)),
    ("Einsum, 1024", Form(layout="einsum", dtype=HALF), Size(4, 1024, 1024, 16, 64)),
    ("values of 128, keys of 192", Form(bias="mask", value_size=128, dtype=HALF), Size(1, 1024, 1024, 16, 192)),
    ("one head of 512, 4096", Form(dtype=HALF), Size(1, 4096, 4096, 1, 512)),
    ("one head of keys for 32", Form(keys="shared", bias="mask", dtype=HALF), Size(1, 1024, 1024, 32, 64)),
    ("widened products, 1024", Form("before", widened=True, dtype=HALF), Size(2, 1024, 1024, 20, 64)),
]
# RMSNorms of hidden states: the number of rows, and the size of each.
NORMS = [(1, 4096), (512, 4096), (4608, 3072)]
WRITTEN_NORM = """
    wide{n} = Cast <to = 1> (x{n})  squares{n} = Mul (wide{n}, wide{n})  mean{n} = ReduceMean (squares{n}, last)
    total{n} = Add (mean{n}, small)  root{n} = Sqrt (total{n})  turned{n} = Reciprocal (root{n})
    normal{n} = Mul (wide{n}, turned{n})  half{n} = Cast <to = 10> (normal{n})  y{n} = Mul (w, half{n})
    x{next} = Add (y{n}, x{n})
"""
# LayerNorms with a scale and a shift for each image: the number of rows, and the size of each.
MODULATED = [(4608, 3072), (4096, 1152)]
WRITTEN_MODULATED = """
    normal{n} = LayerNormalization (x{n}, ones)  times{n} = Mul (normal{n}, scale)  y{n} = Add (times{n}, shift)
    x{next} = Add (y{n}, x{n})
"""
# Gated layers in half precision, as in U-Nets: the number of rows, the size of each, and of each gate.
GATED = [(8192, 640, 2560), (2048, 1280, 5120)]
WRITTEN_GATED = """
    both{n} = MatMul (x{n}, up{n})  biased{n} = Add (both{n}, bias{n})
    value{n}, gate{n} = Split <axis = -1, num_outputs = 2> (biased{n})
    part{n} = Div (gate{n}, root)  error{n} = Erf (part{n})  more{n} = Add (error{n}, one)
    twice{n} = Mul (gate{n}, more{n})  gelu{n} = Mul (twice{n}, half)  open{n} = Mul (value{n}, gelu{n})
    x{next} = MatMul (open{n}, down)
"""
# Group norms of 32 groups, SiLU, convolutions of 3 x 3 and residuals, in half precision: pictures, channels, sides.
IMAGES = [(2, 320, 128), (2, 640, 64), (2, 1280, 32), (1, 128, 1024)]
WRITTEN_IMAGE = """
    grouped{n} = Reshape (x{n}, groups)  normal{n} = InstanceNormalization (grouped{n}, ones, zeros)
    sizes{n} = Shape (x{n})  back{n} = Reshape (normal{n}, sizes{n})
    scaled{n} = Mul (back{n}, scale)  shifted{n} = Add (scaled{n}, shift)
    gate{n} = Sigmoid (shifted{n})  open{n} = Mul (shifted{n}, gate{n})
    y{n} = Conv <pads = [1, 1, 1, 1]> (open{n}, weight{n}, bias)  x{next} = Add (x{n}, y{n})
"""
# Products of joined columns in half precision: the number of rows, the sizes of the parts, and of the result.
JOINED = [(4608, (3072, 12288), 3072)]
WRITTEN_JOINED = """
    both{n} = Concat <axis = -1> (x{n}, z)  x{next} = MatMul (both{n}, down{n})
"""
# Norms of a sum that is read again, in half precision: the operator, the number of rows, and the size of each.
ADDED = [
    (operator, rows, width)
    for operator in ("LayerNormalization", "SimplifiedLayerNormalization")
    for rows, width in ((4608, 3072), (8192, 640), (1, 4096))
]
WRITTEN_ADDED = """
    s{n} = Add (x{n}, z)  y{n} = {operator} <axis = -1, epsilon = 1e-5> (s{n}, w)  x{next} = Add (s{n}, y{n})
"""
# Rotations of [batch, length, heads, size] in single precision between casts, as in Flux, and of [batch, heads,
# length, size] in half precision, as in decoders: heads, length, size.
ROTATIONS = [("neighbours", 24, 4608, 128), ("halves", 32, 2048, 128), ("halves", 32, 1, 128)]
NEIGHBOURS = """
    pairs{n} = Reshape (x{n}, by_pairs)
    a{n} = Slice (pairs{n}, zero, one, last)  b{n} = Slice (pairs{n}, one, two, last)
    minus{n} = Neg (b{n})  joined{n} = Concat <axis = -1> (minus{n}, a{n})  turned{n} = Reshape (joined{n}, whole)
    wide{n} = Cast <to = 1> (x{n})  crossed{n} = Cast <to = 1> (turned{n})  one{n} = Mul (wide{n}, cos)
    other{n} = Mul (crossed{n}, sin)  y{n} = Add (one{n}, other{n})  x{next} = Cast <to = 10> (y{n})
"""
HALVES = """
    a{n} = Slice (x{n}, zero, middle, last)  b{n} = Slice (x{n}, middle, end, last)  minus{n} = Neg (b{n})
    turned{n} = Concat <axis = -1> (minus{n}, a{n})  one{n} = Mul (x{n}, cos)  other{n} = Mul (turned{n}, sin)
    x{next} = Add (one{n}, other{n})
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--only", default="", help="what is in the names of the cases")
    parser.add_argument("--bfloat16", action="store_true", help="the cases in half precision, in bfloat16")
    options = parser.parse_args()
    rows = table("", "written", "fused", "ratio", "difference", right=("written", "fused", "ratio"))
    for name, model, inputs in cases(options.device):
        if options.only not in name or (options.bfloat16 and HALF not in types_of(model)):
            continue
        if options.bfloat16:
            use_bfloat16(model)
        try:
            rows.add_row(name, *measured(model, inputs, options.device, options.runs))
        except Exception as error:
            rows.add_row(name, "", "", "", str(error)[:200])
    out.print(rows)


def measured(model: onnx.ModelProto, inputs: dict[str, np.ndarray], device: str, runs: int) -> list[str]:
    """The times as exported and fused, their ratio, and the largest difference."""
    with tempfile.TemporaryDirectory() as folder:
        path, fused = Path(folder) / "model.onnx", Path(folder) / "fused.onnx"
        onnx.save(model, path)
        analysis = analyze(path, AskedShapes({name: array.shape for name, array in inputs.items()}), 1)
        made = fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ALL)
        assert all(outcome.operator for outcome in made.outcomes), made.outcomes
        engine = made.graph.graph.clone()
        if device == "cuda":
            fuse_for_gpus(engine, analysis.costs.bound.shapes, rows=False)
        ir.save(ir.Model(engine, functions=functions_of(engine), ir_version=made.graph.model.ir_version), fused)
        took, outputs = measure([opened(each, inputs, device) for each in (path, fused)], runs)
    one, other = (array.astype(np.float64) for array in outputs)
    difference = float(np.abs(one - other).max() / np.abs(one).max())
    return [*(f"{1e3 * t:.3f} ms" for t in took), f"{took[0] / took[1]:.2f}", f"{difference:.1e}"]


def types_of(model: onnx.ModelProto) -> set[int]:
    """The types of a model's inputs."""
    return {value.type.tensor_type.elem_type for value in model.graph.input}


def use_bfloat16(model: onnx.ModelProto) -> None:
    """Replace float16 by bfloat16 in place, with casts of inputs and outputs, whose types stay."""
    graph, bfloat16 = model.graph, TensorProto.BFLOAT16
    halves = [value for value in (*graph.input, *graph.output) if value.type.tensor_type.elem_type == HALF]
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [f"{name}/own" if any(name == value.name for value in halves) else name for name in names]
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.i == HALF:
                attribute.i = bfloat16
            if attribute.HasField("t"):
                attribute.t.CopyFrom(as_bfloat16(attribute.t))
    weights = [as_bfloat16(tensor) for tensor in graph.initializer]
    del graph.initializer[:]
    graph.initializer.extend(weights)
    before = [make_node("Cast", [v.name], [f"{v.name}/own"], to=bfloat16) for v in halves if v in graph.input]
    after = [make_node("Cast", [f"{v.name}/own"], [v.name], to=HALF) for v in halves if v in graph.output]
    nodes = [*before, *graph.node, *after]
    del graph.node[:]
    graph.node.extend(nodes)
    del graph.value_info[:]


def as_bfloat16(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """A tensor, in bfloat16 if it is in float16."""
    if tensor.data_type != HALF:
        return tensor
    return onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(ml_dtypes.bfloat16), tensor.name)


def cases(device: str) -> Iterator[tuple[str, onnx.ModelProto, dict[str, np.ndarray]]]:
    """The cases of a device: their names, the models as exported, and inputs."""
    for name, form, size in CPU if device == "cpu" else CUDA:
        yield name, write(form, size, blocks=2), feeds(form, size)
    for rows, width in NORMS if device == "cuda" else []:
        yield f"RMSNorm, {rows} x {width}", write_norms(width), norm_feeds(rows, width)
    for rows, width in MODULATED if device == "cuda" else []:
        yield f"modulated norm, {rows} x {width}", write_modulated(width), modulated_feeds(rows, width)
    for rows, width, inner in GATED if device == "cuda" else []:
        yield f"gated layer, {rows} x {width} to {inner}", write_gated(width, inner), half_feeds(x0=(1, rows, width))
    for count, channels, side in IMAGES if device == "cuda" else []:
        name = f"group norm and convolution, {count} x {channels} x {side} x {side}"
        yield name, write_images(channels), half_feeds(x0=(count, channels, side, side))
    for rows, widths, columns in JOINED if device == "cuda" else []:
        name = f"product of {widths[0]} and {widths[1]} columns, {rows} rows"
        yield name, write_joined(widths, columns), half_feeds(x0=(1, rows, widths[0]), z=(1, rows, widths[1]))
    for operator, rows, width in ADDED if device == "cuda" else []:
        name = f"{operator} of a sum, {rows} x {width}"
        yield name, write_added(operator, width), half_feeds(x0=(rows, width), z=(rows, width))
    for pairs, heads, length, width in ROTATIONS if device == "cuda" else []:
        name = f"rotary embedding, {pairs}, {length} x {heads} x {width}"
        yield name, write_rotations(pairs, heads, width), rotation_feeds(pairs, heads, length, width)


def write_modulated(width: int, count: int = 8) -> onnx.ModelProto:
    """Modulated norms one after the other, each added to its input, in half precision."""
    body = "".join(WRITTEN_MODULATED.format(n=number, next=number + 1) for number in range(count))
    row = f"float16[2, 1, {width}]"
    head = f"g (float16[2, rows, {width}] x0, {row} scale, {row} shift) => (float16[2, rows, {width}] y)"
    text = f'<ir_version: 8, opset_import: ["" : 18]> {head} {{ {body} y = Identity (x{count}) }}'
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(width, np.float16), "ones"))
    return model


def write_gated(width: int, inner: int, count: int = 8) -> onnx.ModelProto:
    """Gated layers one after the other, in half precision."""
    body = "".join(WRITTEN_GATED.format(n=number, next=number + 1) for number in range(count))
    head = f"g (float16[1, rows, {width}] x0) => (float16[1, rows, {width}] y)"
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 18]> {head} {{ {body} y = Identity (x{count}) }}'
    )
    random = np.random.default_rng(0)
    weights: dict[str, np.ndarray] = {
        **{f"up{number}": random.standard_normal((width, 2 * inner)) / width**0.5 for number in range(count)},
        **{f"bias{number}": random.standard_normal(2 * inner) / 8 for number in range(count)},
        "down": random.standard_normal((inner, width)) / inner**0.5,
        "root": np.array(2**0.5),
        "one": np.array(1.0),
        "half": np.array(0.5),
    }
    for name, array in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float16), name))
    return model


def write_images(channels: int, count: int = 8) -> onnx.ModelProto:
    """Group norms with convolutions, one after the other, in half precision."""
    body = "".join(WRITTEN_IMAGE.format(n=number, next=number + 1) for number in range(count))
    images = f"float16[count, {channels}, side, side]"
    constants = "groups = Constant <value_ints = [0, 32, -1]> ()"
    text = f'<ir_version: 8, opset_import: ["" : 18]> g ({images} x0) => ({images} y)'
    model = onnx.parser.parse_model(f"{text} {{ {constants} {body} y = Identity (x{count}) }}")
    random = np.random.default_rng(0)
    spread = 3 * channels**0.5
    weights: dict[str, np.ndarray] = {
        **{f"weight{number}": random.standard_normal((channels, channels, 3, 3)) / spread for number in range(count)},
        "bias": random.standard_normal(channels) / 8,
        "scale": 1 + random.standard_normal((channels, 1, 1)) / 8,
        "shift": random.standard_normal((channels, 1, 1)) / 8,
        "ones": np.ones(32),
        "zeros": np.zeros(32),
    }
    for name, array in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float16), name))
    return model


def write_joined(widths: tuple[int, int], columns: int, count: int = 8) -> onnx.ModelProto:
    """Products of joined columns one after the other, in half precision."""
    body = "".join(WRITTEN_JOINED.format(n=number, next=number + 1) for number in range(count))
    head = f"g (float16[1, rows, {widths[0]}] x0, float16[1, rows, {widths[1]}] z) => (float16[1, rows, {columns}] y)"
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 20]> {head} {{ {body} y = Identity (x{count}) }}'
    )
    weight = np.random.default_rng(0).standard_normal((sum(widths), columns)) / sum(widths) ** 0.5
    for number in range(count):
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight.astype(np.float16), f"down{number}"))
    return model


def write_added(operator: str, width: int, count: int = 8) -> onnx.ModelProto:
    """Norms of sums one after the other, in half precision."""
    body = "".join(WRITTEN_ADDED.format(n=number, next=number + 1, operator=operator) for number in range(count))
    head = f"g (float16[rows, {width}] x0, float16[rows, {width}] z) => (float16[rows, {width}] y)"
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 18]> {head} {{ {body} y = Identity (x{count}) }}'
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(width, np.float16), "w"))
    return model


def half_feeds(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}


def modulated_feeds(rows: int, width: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    shapes = {"x0": (2, rows, width), "scale": (2, 1, width), "shift": (2, 1, width)}
    return {name: generator.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}


def write_rotations(form: str, heads: int, size: int, count: int = 8) -> onnx.ModelProto:
    """Rotations one after the other, in half precision."""
    neighbours = form == "neighbours"
    body = "".join((NEIGHBOURS if neighbours else HALVES).format(n=number, next=number + 1) for number in range(count))
    axes, axis = (f"1, length, {heads}", 2) if neighbours else (f"1, {heads}, length", 1)
    tables = (
        "thin = Unsqueeze (angles, last)  twice = Concat <axis = -1> (thin, thin)  table = Reshape (twice, rows)"
        if neighbours
        else "table = Concat <axis = -1> (angles, angles)"
    )
    lists = {"last": [-1], "zero": [0], "one": [1], "two": [2], "middle": [size // 2], "end": [size], "at": [axis]}
    lists |= {"by_pairs": [0, 0, heads, size // 2, 2], "whole": [0, 0, heads, size], "rows": [0, 0, size]}
    constants = "".join(f"{name} = Constant <value_ints = {numbers}> ()  " for name, numbers in lists.items())
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
        rotate (float16[{axes}, {size}] x0, float[1, length, {size // 2}] angles) => (float16[{axes}, {size}] y)
        {{ {constants} {tables}  cosines = Cos (table)  sines = Sin (table)  wide_cos = Unsqueeze (cosines, at)
        wide_sin = Unsqueeze (sines, at)  cos = CastLike (wide_cos, {"angles" if neighbours else "x0"})
        sin = CastLike (wide_sin, {"angles" if neighbours else "x0"}) {body} y = Identity (x{count}) }}"""
    return onnx.parser.parse_model(text)


def rotation_feeds(form: str, heads: int, length: int, size: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    middle = (length, heads) if form == "neighbours" else (heads, length)
    data = generator.standard_normal((1, *middle, size)).astype(np.float16)
    return {"x0": data, "angles": generator.standard_normal((1, length, size // 2)).astype(np.float32)}


def write_norms(width: int, count: int = 8) -> onnx.ModelProto:
    """Norms one after the other, each added to its input, in half precision."""
    body = "".join(WRITTEN_NORM.format(n=number, next=number + 1) for number in range(count))
    head = f"norms (float16[rows, {width}] x0, float16[{width}] w) => (float16[rows, {width}] y)"
    constants = "last = Constant <value_ints = [-1]> ()  small = Constant <value_float = 1e-5> ()"
    text = f'<ir_version: 8, opset_import: ["" : 18]> {head} {{ {constants} {body} y = Identity (x{count}) }}'
    return onnx.parser.parse_model(text)


def norm_feeds(rows: int, width: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        name: generator.standard_normal(shape).astype(np.float16)
        for name, shape in (("x0", (rows, width)), ("w", (width,)))
    }


def opened(path: Path, inputs: dict[str, np.ndarray], device: str) -> Callable[[], ort.OrtValue]:
    """A function that runs a model in a session of its own, and leaves its output on the device."""
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = 1
    settings.log_severity_level = 3
    # As in engines (runtime/engines/onnxruntime_gpu.py).
    cuda = ("CUDAExecutionProvider", {"cudnn_conv_algo_search": "HEURISTIC"})
    provider: tuple[str, dict[str, str]] = {"cpu": ("CPUExecutionProvider", {}), "cuda": cuda}[device]
    session = open_onnx(path, settings, [provider], on_gpu=device == "cuda")
    assert session.get_providers()[0] == provider[0]
    binding = session.io_binding()
    kept = [ort.OrtValue.ortvalue_from_numpy(array, device, 0) for array in inputs.values()]
    for name, value in zip(inputs, kept, strict=True):
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("y", device, 0)

    def run() -> ort.OrtValue:
        session.run_with_iobinding(binding)
        assert kept, "what is bound has to live as long"
        return binding.get_outputs()[0]

    return run


def measure(runs: list[Callable[[], ort.OrtValue]], count: int) -> tuple[list[float], list[np.ndarray]]:
    """The median seconds of each function, run in turns, and their outputs."""
    outputs = [run().numpy() for run in runs]
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(count):
        for times, run in zip(seconds, runs, strict=True):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds], outputs


if __name__ == "__main__":
    main()
