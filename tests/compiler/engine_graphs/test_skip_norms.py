"""A norm and the addition before it become one operator in engines for GPUs, and give the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from tests.conftest import run_whole
from tests.helpers.written_attention import operators

SIZE = 8
BLOCK = """e{n} = MatMul (x{n}, u)  p{n} = MatMul (e{n}, d)
    q{n} = Add (p{n}, b)  s{n} = Add (q{n}, x{n})
    l{n} = LayerNormalization <axis = -1> (s{n}, scale, shift)  h{n} = MatMul (l{n}, u)
    m{n} = MatMul (h{n}, d)  x{next} = Add (s{n}, m{n})
"""
ROOT = """e{n} = MatMul (x{n}, u)  p{n} = MatMul (e{n}, d)  s{n} = Add (x{n}, p{n})
    l{n} = SimplifiedLayerNormalization <axis = -1> (s{n}, scale)  h{n} = MatMul (l{n}, u)
    m{n} = MatMul (h{n}, d)  x{next} = Add (s{n}, m{n})
"""

# Its scale is computed after the addition.
LATE = """e{n} = MatMul (x{n}, u)  p{n} = MatMul (e{n}, d)  s{n} = Add (x{n}, p{n})
    a{n} = Constant <value_ints = [0, 1]> ()  c{n} = ReduceMean <keepdims = 0> (z, a{n})
    l{n} = SimplifiedLayerNormalization <axis = -1> (s{n}, c{n})  h{n} = MatMul (l{n}, u)
    m{n} = MatMul (h{n}, d)  x{next} = Add (s{n}, m{n})
"""


NEWER = ROOT.replace("SimplifiedLayer", "RMS")


NUMBERS: dict[str, Any] = {"float16": np.float16, "float": np.float32, "double": np.float64}


def written(block: str, count: int = 3, other: str = "batch, length", dtype: str = "float16") -> onnx.ModelProto:
    body = "".join(block.format(n=number, next=number + 1) for number in range(count))
    head = f"g ({dtype}[batch, length, {SIZE}] x0, {dtype}[{other}, {SIZE}] z) => ({dtype}[batch, length, {SIZE}] y)"
    opset = 23 if block is NEWER else 18
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}]> {head} {{ {body} y = Add (x{count}, z) }}'
    )
    random = np.random.default_rng(0)
    for name, shape in {
        "u": (SIZE, 4 * SIZE),
        "d": (4 * SIZE, SIZE),
        "b": (SIZE,),
        "scale": (SIZE,),
        "shift": (SIZE,),
    }.items():
        array = random.standard_normal(shape).astype(NUMBERS[dtype]) / 8
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def engines(model: onnx.ModelProto, folder: Path, devices: list[str], mode: str = "layer") -> tuple[Path, list[str]]:
    """A package, and the operators of all its engines."""
    onnx.save(model, folder / "model.onnx")
    request = Request(split_mode=mode, shapes={"x0": (2, 16, SIZE)}, spread=True)
    compile_model(plan_model(folder / "model.onnx", devices, request), folder / "package", verify=False)
    files = sorted((folder / "package").glob("rank*/*.onnx"))
    graphs = [ir.load(file).graph for file in files]
    for graph in graphs:
        graph.clone()  # which fails unless nodes come after those that they read
    return folder / "package", [name for graph in graphs for name in operators(graph)]


# Each pair of a form and a mode, of a form and a type, and of a mode and a type.
@pytest.mark.parametrize(("dtype", "tolerance", "even"), [("float16", 2e-2, "layer"), ("float", 1e-5, "tensor")])
@pytest.mark.parametrize(
    ("block", "skip", "turn"),
    [
        (BLOCK, "SkipLayerNormalization", False),
        (ROOT, "SkipSimplifiedLayerNormalization", True),
        (LATE, "SkipSimplifiedLayerNormalization", False),
        (NEWER, "SkipSimplifiedLayerNormalization", True),
    ],
)
def test_packages_for_gpus_add_and_norm_at_once(
    tmp_path: Path, block: str, skip: str, turn: bool, dtype: str, tolerance: float, even: str
) -> None:
    mode = {"layer": "tensor", "tensor": "layer"}[even] if turn else even
    model = written(block, dtype=dtype)
    package, made = engines(model, tmp_path, ["cuda0", "cuda1"], mode)
    ranks = 1 if mode == "layer" else 2
    assert made.count(f"com.microsoft.{skip}") == 3 * ranks
    if mode == "layer" and block is BLOCK:
        assert made.count("Add") == 4, "the biases are added by the operator too"
    random = np.random.default_rng(1)
    inputs = {name: random.standard_normal((3, 5, SIZE)).astype(NUMBERS[dtype]) for name in ("x0", "z")}
    with Session(package, devices=["cpu0", "cpu1"]) as session:
        outputs = session.run(inputs)
    expected = run_whole(tmp_path / "model.onnx", inputs)
    np.testing.assert_allclose(
        outputs["y"].astype(np.float32), expected["y"].astype(np.float32), rtol=0, atol=tolerance
    )


BROADCAST = "t{n} = Add (x{n}, z)  x{next} = LayerNormalization <axis = -1> (t{n}, scale, shift)\n"
# Its scale is computed from the sum.
OWN = """t{n} = Add (x{n}, z)  a{n} = Constant <value_ints = [0, 1]> ()  c{n} = ReduceMean <keepdims = 0> (t{n}, a{n})
    x{next} = LayerNormalization <axis = -1> (t{n}, c{n})
"""
ALONG = "t{n} = Add (x{n}, x{n})  x{next} = LayerNormalization <axis = -1> (t{n}, scale, shift)\n"


@pytest.mark.parametrize(
    ("model", "devices"),
    [
        (written(BLOCK), ["cpu0", "cpu1"]),
        (written(BLOCK, dtype="double"), ["cuda0", "cuda1"]),
        (written(BROADCAST, other="1, length"), ["cuda0"]),
        (written(ALONG), ["cuda0"]),
        (written(OWN), ["cuda0"]),
    ],
    ids=["on CPU devices", "double precision", "a sum of other sizes", "twice the same", "a scale of the sum"],
)
def test_other_norms_stay(tmp_path: Path, model: onnx.ModelProto, devices: list[str]) -> None:
    _, made = engines(model, tmp_path, devices)
    assert "LayerNormalization" in made
    assert not any("Skip" in name for name in made)
