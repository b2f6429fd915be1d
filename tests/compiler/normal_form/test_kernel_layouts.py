"""Quantized weights in the layout of a CUDA kernel, as onnxruntime-genai's builder writes them, get ONNX's layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.graphs.optional import mark_optional
from splitc.compiler.normal_form.kernel_layouts import AMPERE, HOPPER, unpack, unpack_weights
from splitc.runtime import Session
from tests.conftest import assert_close, run_whole
from tests.helpers.needs import need_experts, needs_packed_weights

Bytes = npt.NDArray[np.uint8]

WIDE, INNER, EXPERTS, BLOCK = 64, 128, 4, 32


def pack(matrix: Bytes, bits: int, layout: int = AMPERE) -> Bytes:
    """Bytes [outputs, inputs x bits / 8] in a kernel's layout, in the steps of genai's cuda_quantizer.py."""
    numbers = matrix if bits == 8 else np.stack([matrix & 15, matrix >> 4], -1).reshape(len(matrix), -1)
    rows = {8: [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]}
    rows[4] = [at + 2 * turn for turn in range(4) for at in (0, 1, 8, 9, 16, 17, 24, 25)]
    places = [start + row for start in range(0, numbers.shape[1], len(rows[bits])) for row in rows[bits]]
    together = 16 // bits
    tiles = numbers[:, places].reshape(-1, together, numbers.shape[1] // 64, 64)
    tiles = tiles.transpose(0, 2, 1, 3) if layout == AMPERE else tiles
    order = {8: [0, 2, 1, 3], 4: [0, 2, 4, 6, 1, 3, 5, 7]}[bits]
    made: Bytes = tiles.reshape(-1, len(order))[:, order].reshape(-1)
    return made if bits == 8 else made[::2] | (made[1::2] << np.uint8(4))


@pytest.mark.parametrize(
    ("bits", "layout", "begins"),
    [
        (4, AMPERE, (251, 115, 24, 75)),
        (8, AMPERE, (139, 179, 176, 216)),
        (4, HOPPER, (251, 115, 212, 7)),
        (8, HOPPER, (75, 115, 112, 152)),
    ],
)
def test_layout_is_that_of_the_builder(bits: int, layout: int, begins: tuple[int, ...]) -> None:
    """`begins` is what onnxruntime-genai 0.18 writes from byte 64 on."""
    matrix = (np.arange(32 * 128 * bits // 8) * 37 + 11).astype(np.uint8).reshape(32, -1)
    packed = pack(matrix, bits, layout)
    assert tuple(packed[64:68].tolist()) == begins
    assert np.array_equal(unpack(packed, 32, 128, bits, layout), matrix)


def write(path: Path, bits: int, layout: int | None, blocks: bool = True, packed: bool = True) -> None:
    """A mixture with gated activations. With `layout`, the node says which; `packed`: in the kernel's layout."""
    said = "" if layout is None else f", weights_prepacked = {layout}"
    said += f", block_size = {BLOCK}" if blocks else ""
    model = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>
    mixture (float16[n, {WIDE}] x, float16[n, {EXPERTS}] scores) => (float16[n, {WIDE}] y) {{
        y = com.microsoft.QMoE <k = 2, expert_weight_bits = {bits}, normalize_routing_weights = 1,
            activation_type = "swiglu", swiglu_fusion = 1{said}> (x, scores, A, A_scales, , B, B_scales) }}""")
    random = np.random.default_rng(0)
    for name, outputs, inputs in (("A", 2 * INNER, WIDE), ("B", WIDE, INNER)):
        weight = random.integers(0, 256, (EXPERTS, outputs, inputs * bits // 8), np.uint8)
        if packed:
            shape = EXPERTS, inputs, outputs * bits // 8
            weight = np.stack([pack(one, bits) for one in weight]).reshape(shape)
        sizes = (EXPERTS, outputs, inputs // BLOCK) if blocks else (EXPERTS, outputs)
        scales = (random.uniform(0.5, 1, sizes) * 2.0 ** (2 - bits) / 8).astype(np.float16)
        model.graph.initializer.append(numpy_helper.from_array(weight, name))
        model.graph.initializer.append(numpy_helper.from_array(scales, f"{name}_scales"))
    onnx.save(model, path)


@pytest.mark.parametrize(
    ("bits", "layout", "blocks", "mode"),
    [(4, None, True, "tensor"), (4, 1, False, "tensor"), (8, -1, True, "tensor"), (4, None, True, "layer")],
)
def test_packed_experts_are_split(bits: int, layout: int | None, blocks: bool, mode: str, tmp_path: Path) -> None:
    """The package runs on CPU devices, is compared when it is compiled, and gives what ONNX's layout gives."""
    need_experts("quantized")
    write(tmp_path / "model.onnx", bits, layout, blocks)
    write(tmp_path / "raw.onnx", bits, 0, blocks, packed=False)
    devices = ["cpu0"] if mode == "layer" else ["2xcpu"]
    plan = plan_model(tmp_path / "model.onnx", devices, Request(split_mode=mode, spread=True))
    if mode == "tensor":
        assert {weight.name for weight in plan.weights if weight.units == "1,1"} >= {"A", "B"}
    said: list[str] = []
    compile_model(plan, tmp_path / "package", say=said.append)
    assert mode == "layer" or any("agree" in text for text in said)
    random = np.random.default_rng(1)
    fed = {"x": random.standard_normal((3, WIDE)).astype(np.float16)}
    fed["scores"] = random.standard_normal((3, EXPERTS)).astype(np.float16)
    with Session(tmp_path / "package") as session:
        assert_close(session.run(fed), run_whole(tmp_path / "raw.onnx", fed), 4e-3)


@pytest.mark.parametrize("case", ["said", "shape", "overridable", "read twice", "few columns"])
def test_other_experts_stay_as_they_are(case: str, tmp_path: Path) -> None:
    """In ONNX's layout by their attribute, or by their shape; or of use to others; or of half a tile."""
    path = tmp_path / "model.onnx"
    write(path, 4, 0 if case == "said" else -1, packed=case != "shape")
    proto = onnx.load(path)
    graph = proto.graph
    if case == "overridable":
        graph.input.append(onnx.helper.make_tensor_value_info("A", onnx.TensorProto.UINT8, graph.initializer[0].dims))
    if case == "read twice":
        graph.node.append(onnx.helper.make_node("Identity", ["A"], ["copy"]))
    if case == "few columns":
        halves = {"A": np.s_[:, :32], "A_scales": np.s_[:, :, :1], "B": np.s_[:, :, :16], "B_scales": np.s_[:, :32]}
        for tensor in graph.initializer:
            array = numpy_helper.to_array(tensor)[halves[tensor.name]]
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    model = ir.from_proto(proto)
    mark_optional(model)
    before = [model.graph.initializers[name].const_value for name in "AB"]
    assert not unpack_weights(model)
    assert [model.graph.initializers[name].const_value for name in "AB"] == before


def write_products(path: Path, bits: int, layout: int) -> None:
    """Two products of quantized weights, in ONNX's layout if `layout` is 0."""
    how = f"bits = {bits}, block_size = {BLOCK}, weight_prepacked = {layout}"
    model = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>
    products (float[n, {WIDE}] x) => (float[n, {WIDE}] y) {{
        inner = com.microsoft.MatMulNBits <K = {WIDE}, N = {INNER}, {how}> (x, A, A_scales)  large = Relu (inner)
        y = com.microsoft.MatMulNBits <K = {INNER}, N = {WIDE}, {how}> (large, B, B_scales) }}""")
    random = np.random.default_rng(0)
    for name, outputs, inputs in (("A", INNER, WIDE), ("B", WIDE, INNER)):
        weight = random.integers(0, 256, (outputs, inputs * bits // 8), np.uint8)
        weight = pack(weight, bits, layout) if layout else weight
        scales = random.uniform(0.5, 1, (outputs, inputs // BLOCK)).astype(np.float32)
        shaped = weight.reshape(outputs, inputs // BLOCK, -1)
        model.graph.initializer.append(numpy_helper.from_array(shaped, name))
        model.graph.initializer.append(numpy_helper.from_array(scales, f"{name}_scales"))
    onnx.save(model, path)


@needs_packed_weights
@pytest.mark.parametrize(("bits", "layout"), [(4, AMPERE), (8, HOPPER)])
def test_packed_products_are_split(bits: int, layout: int, tmp_path: Path) -> None:
    write_products(tmp_path / "model.onnx", bits, layout)
    write_products(tmp_path / "raw.onnx", bits, 0)
    plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode="tensor", spread=True))
    assert {weight.name for weight in plan.weights if weight.units} == {"A", "B", "A_scales", "B_scales"}
    said: list[str] = []
    compile_model(plan, tmp_path / "package", say=said.append)
    assert any("agree" in text for text in said)
    fed = {"x": np.random.default_rng(1).standard_normal((3, WIDE)).astype(np.float32)}
    with Session(tmp_path / "package") as session:
        assert_close(session.run(fed), run_whole(tmp_path / "raw.onnx", fed), 1e-3)
