"""Sizes reach GPUs without copies: where ONNX Runtime has each value, and that results are the same to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.shape_inference
import onnx_ir as ir
import pytest

from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.engine_graphs.cpu_values import place_values, why_not_captured
from splitc.compiler.engine_graphs.gpu_sizes import keep_on_gpu
from splitc.compiler.graphs.origins import note_sizes, stand_for
from splitc.compiler.operators.gpu_kernels import has_gpu_kernel
from splitc.runtime import Session
from splitc.runtime.package.manifest_file import read_manifest
from tests.conftest import run_whole
from tests.helpers.blocks import Block
from tests.helpers.needs import needs_later_operators


def length(block: Block, value: ir.Value) -> ir.Value:
    """The size of a value's first axis, a number."""
    return block.op("Gather", block.op("Shape", value), block.constant(0, np.int64))


def compared(block: Block, x: ir.Value) -> None:
    """Positions up to a length."""
    places = block.op("Range", block.constant(0, np.int64), length(block, x), block.constant(1, np.int64))
    half = block.op("Div", length(block, x), block.constant(2, np.int64))
    first = block.op("LessOrEqual", places, block.op("Unsqueeze", half, block.ints(0)))
    mask = block.op("Unsqueeze", block.op("Cast", first, to=ir.DataType.FLOAT), block.ints(1))
    block.give(block.op("Mul", x, mask), shape=["n", 8])


def scaled(block: Block, x: ir.Value) -> None:
    """Numbers over the root of a length."""
    count = block.op("Cast", length(block, x), to=ir.DataType.FLOAT)
    block.give(block.op("Div", x, block.op("Sqrt", count)), shape=["n", 8])


def listed(block: Block, x: ir.Value) -> None:
    """Both sizes of a value, added as a row."""
    sizes = block.op("Cast", block.op("Shape", x), to=ir.DataType.FLOAT)
    four = block.op("Concat", sizes, sizes, sizes, sizes, axis=0)
    block.give(block.op("Add", x, four), shape=["n", 8])


def chosen(block: Block, x: ir.Value) -> None:
    """What a comparison of sizes chooses."""
    many = block.op("Greater", length(block, x), block.constant(4, np.int64))
    block.give(block.op("Where", many, x, block.op("Neg", x)), shape=["n", 8])


def largest(block: Block, x: ir.Value, extreme: str = "ArgMax", dtype: ir.DataType = ir.DataType.INT32) -> None:
    """The place of the largest whole number, of a type without a kernel. Some numbers are equal."""
    whole = block.op("Cast", x, to=dtype)
    block.give(block.op(extreme, whole, axis=1, keepdims=0), shape=["n"], dtype=ir.DataType.INT64)


def smallest(block: Block, x: ir.Value) -> None:
    largest(block, x, "ArgMin", ir.DataType.INT64)


def bent(block: Block, x: ir.Value) -> None:
    block.give(block.op("Celu", x), shape=["n", 8])


def dequantized(block: Block, x: ir.Value) -> None:
    """A bias of the type that no kernel dequantizes."""
    scale = block.constant(np.linspace(0.1, 0.2, 8), np.float32)
    bias = block.op("DequantizeLinear", block.constant(np.arange(-4, 4) * 3, np.int32), scale, axis=0)
    block.give(block.op("Add", x, bias), shape=["n", 8])


def repeated(block: Block, x: ir.Value) -> None:
    """As many times as its axis is long, as torch's repeat_interleave is written."""
    times = block.op("Concat", block.ints(1), block.op("Unsqueeze", length(block, x), block.ints(0)), axis=0)
    picked = block.op("OneHot", block.ints(-1), block.constant(2, np.int64), times)
    block.give(block.op("Tile", x, block.op("Reshape", picked, block.ints(2))), shape=["n", "m"])


def spread(block: Block, x: ir.Value, times: int = 40) -> None:
    """Often the place in the middle, as tables of positions are made."""
    half = block.op("Div", length(block, x), block.constant(2, np.int64))
    places = block.op("Expand", block.op("Unsqueeze", half, block.ints(0)), block.ints(times))
    block.give(block.op("Gather", x, places), shape=[times, 8])


def clipped(block: Block, x: ir.Value) -> None:
    """Places up to a length, which the kernel for GPUs reads there."""
    whole = block.op("Cast", block.op("Mul", x, block.constant(9.0, np.float32)), to=ir.DataType.INT64)
    places = block.op("Clip", whole, block.constant(0, np.int64), length(block, x))
    block.give(block.op("Cast", places, to=ir.DataType.FLOAT), shape=["n", 8])


def weighed(block: Block, x: ir.Value) -> None:
    """An input of whole numbers, times a size: ONNX Runtime would take it on the CPU, as inputs may be anywhere."""
    ids = block.indices("ids", [1, 2, 3, 4, 5, 6], ["n"])
    times = block.op("Mul", ids, length(block, x))
    block.give(
        block.op("Add", x, block.op("Unsqueeze", block.op("Cast", times, to=ir.DataType.FLOAT), block.ints(1))),
        shape=["n", 8],
    )


def padded(block: Block, x: ir.Value, mode: str = "constant") -> None:
    """Large whole numbers, to a longer row, as masks are to whole windows."""
    large = block.op("Cast", block.op("Mul", x, block.constant(2.0**61, np.float32)), to=ir.DataType.INT64)
    whole = block.op("Add", large, block.op("Cast", block.op("Mul", x, block.constant(9.0, np.float32)), to=7))
    fill = block.constant(-(1 << 61) - 5, np.int64)
    made = block.op("Pad", whole, block.ints(0, 1, 0, 2), fill, mode=mode)
    block.give(made, shape=["n", 11], dtype=ir.DataType.INT64)


def mirrored(block: Block, x: ir.Value) -> None:
    padded(block, x, "reflect")


def masked(block: Block, x: ir.Value) -> None:
    """A mask, repeated."""
    above = block.op("Greater", x, block.constant(0.1, np.float32))
    block.give(block.op("Tile", above, block.ints(1, 2)), shape=["n", 16], dtype=ir.DataType.BOOL)


def narrow(block: Block, x: ir.Value) -> None:
    """Numbers of 8 and of 32 bits, with a sign or without."""
    small = block.op("Cast", block.op("Mul", x, block.constant(9.0, np.float32)), to=ir.DataType.INT8)
    most = block.op("Relu", block.op("Max", small, block.op("Neg", small)))
    places = block.constant([[0, 1]], np.int64)
    picked = block.op("GatherND", block.op("Cast", most, to=ir.DataType.INT32), places)
    greater = block.op("Greater", small, most)
    count = block.op("Where", greater, *(block.op("Cast", one, to=ir.DataType.UINT32) for one in (most, picked)))
    first = block.op("ArgMax", most, axis=1)
    above = block.op("Cast", block.op("Add", first, block.op("Cast", count, to=7)), to=ir.DataType.INT32)
    bounded = block.op("Clip", block.op("Add", above, picked), block.constant(1, np.int32))
    block.give(bounded, shape=["n", 8], dtype=ir.DataType.INT32)


def sampled(block: Block, x: ir.Value) -> None:
    """An image in half precision, at the places that it has itself."""
    half = block.op("Cast", block.op("Tanh", x), to=ir.DataType.FLOAT16)
    image, places = (block.op("Reshape", half, block.ints(-1, *sizes)) for sizes in ((1, 2, 4), (2, 2, 2)))
    made = block.op("Reshape", block.op("GridSample", image, places), block.ints(-1, 4))
    block.give(block.op("Cast", made, to=ir.DataType.FLOAT), shape=["n", 4])


FORMS = [weighed, compared, scaled, listed, chosen, largest, smallest, bent, dequantized, repeated, spread, clipped]
FORMS += [padded, mirrored, masked, narrow, sampled]


def written(tmp_path: Path, form: Callable[[Block, ir.Value], None]) -> tuple[Path, Block]:
    block = Block()
    form(block, block.op("MatMul", block.data("x", (6, 8), ["n", 8]), block.w("A", 8, 8)))
    path = tmp_path / "model.onnx"
    save(block.model(), path)
    return path, block


def package(model: Path, device: str) -> Path:
    place = model.with_name(device)
    request = Request(split_mode="layer", engine="onnxruntime", memory=("1GiB",))
    compile_model(plan_model(model, [device], request), place, verify=False)
    return place


def engine(package: Path) -> ir.Graph:
    """The package's one engine, with the types that follow from its inputs."""
    model = onnx.load(package / "rank0" / "stage0.onnx", load_external_data=False)
    return ir.from_proto(onnx.shape_inference.infer_shapes(model)).graph


@needs_later_operators
@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_copied_and_results_stay_the_same(form: Callable[[Block, ir.Value], None], tmp_path: Path) -> None:
    model, block = written(tmp_path, form)
    plain, kept = package(model, "cpu0"), package(model, "cuda0")
    assert why_not_captured(engine(plain)), "the form has something to spare"
    assert why_not_captured(engine(kept)) == ""
    assert [file.not_captured for file in read_manifest(kept).ranks[0].engines] == [""]
    for size in (1, 6, 5):
        feeds: dict[str, Any] = {"x": block.random("x", size, 8), "ids": np.arange(size)}
        feeds = {name: feeds[name] for name in block.feeds}
        with Session(kept, devices=["cpu0"]) as session:
            made = session.run(feeds)
        for name, expected in run_whole(model, feeds).items():
            np.testing.assert_array_equal(made[name], expected)


def any_above(block: Block, x: ir.Value) -> None:
    """Whether any number is large, as torch's older exporter writes `any`, chooses between x and -x."""
    above = block.op("Cast", block.op("Greater", x, block.constant(4.0, np.float32)), to=ir.DataType.INT64)
    is_any = block.op("Greater", block.op("ReduceSum", above, keepdims=0), block.constant(0, np.int64))
    block.give(block.op("Where", is_any, x, block.op("Neg", x)), shape=["n", 8])


def test_whether_any_is_true_is_asked_in_single_precision(tmp_path: Path) -> None:
    """A sum of 2^20 integers takes 1.1 ms on an H200."""
    model, block = written(tmp_path, any_above)
    kept = package(model, "cuda0")
    (total,) = (node for node in engine(kept) if node.op_type == "ReduceSum")
    assert total.inputs[0] is not None and total.inputs[0].dtype == ir.DataType.FLOAT
    for factor in (0.001, 100.0):
        feeds = {"x": block.random("x", 5, 8) * np.float32(factor)}
        with Session(kept, devices=["cpu0"]) as session:
            made = session.run(feeds)
        for name, expected in run_whole(model, feeds).items():
            np.testing.assert_array_equal(made[name], expected)


@pytest.mark.parametrize("count", [32, 33, 1100])
def test_very_many_are_joined_in_groups(count: int, tmp_path: Path) -> None:
    """As the steps of a loop that was unrolled are. ONNX Runtime captures no Concat of more than 32."""

    def joined(block: Block, x: ir.Value) -> None:
        rows = [block.op("Mul", x, block.constant(float(number), np.float32)) for number in range(count)]
        block.give(block.op("Concat", *rows, axis=1), shape=["n", 8 * count])

    model, block = written(tmp_path, joined)
    graph = ir.load(model)
    keep_on_gpu(graph.graph, {})
    sizes = [len(node.inputs) for node in graph.graph if node.op_type == "Concat"]
    assert max(sizes) <= 32 and (len(sizes) == 1) == (count <= 32)
    ir.save(graph, tmp_path / "kept.onnx")
    feeds = {"x": block.random("x", 3, 8)}
    for name, expected in run_whole(model, feeds).items():
        np.testing.assert_array_equal(run_whole(tmp_path / "kept.onnx", feeds)[name], expected)


def test_a_list_is_as_long_as_it_is_on_its_rank(tmp_path: Path) -> None:
    """Places that are computed from sizes may be sharded: a rank has three of six."""
    model, _ = written(tmp_path, lambda block, x: spread(block, x, 3))
    graph = ir.load(model).graph
    (places,) = (node.outputs[0] for node in graph if node.op_type == "Expand")
    stand_for(places, ir.val("places", ir.DataType.INT64, [6]))
    note_sizes(places, ir.Shape([3]))
    keep_on_gpu(graph, {})
    assert [node.op_type for node in graph].count("Range") == 3


def test_what_depends_on_data_stays_where_it_is(tmp_path: Path) -> None:
    """How many there are is known by the GPU, and a Range needs it on the CPU."""

    def counted(block: Block, x: ir.Value) -> None:
        above = block.op("Cast", block.op("Greater", x, block.constant(0.0, np.float32)), to=ir.DataType.INT64)
        count = block.op("ReduceSum", above, keepdims=0)
        places = block.op("Range", block.constant(0, np.int64), count, block.constant(1, np.int64))
        block.give(places, shape=["k"], dtype=ir.DataType.INT64)

    model, _ = written(tmp_path, counted)
    (file,) = read_manifest(package(model, "cuda0")).ranks[0].engines
    assert file.not_captured.startswith("Range '") and file.not_captured.endswith("which is computed on the GPU")


def test_control_flow_and_missing_kernels_are_named() -> None:
    def graph(node: ir.Node, *inputs: ir.Value) -> ir.Graph:
        node.outputs[0].name = "y"
        return ir.Graph(inputs, node.outputs, nodes=[node])

    x = ir.val("x", ir.DataType.INT32, ["n", 8])
    assert why_not_captured(graph(ir.node("ArgMin", [x]), x)) == "ArgMin 'y' has no kernel for GPUs"
    x = ir.val("x", ir.DataType.FLOAT, ["n", 8])
    assert why_not_captured(graph(ir.node("ArgMin", [x]), x)) == ""
    x = ir.val("x", ir.DataType.FLOAT, ["n", 8])
    assert why_not_captured(graph(ir.node("Acos", [x]), x)) == "Acos 'y' has no kernel for GPUs"
    x = ir.val("x", ir.DataType.UINT8, ["n", 8])
    added = ir.node("QLinearAdd", [x, x], domain="com.microsoft")
    assert why_not_captured(graph(added, x)) == "QLinearAdd 'y' has no kernel for GPUs"
    inner = ir.val("inner", ir.DataType.FLOAT, [])
    branch = ir.Graph([], [inner], nodes=[ir.node("Constant", [], {"value_float": 1.0}, outputs=[inner])])
    x = ir.val("x", ir.DataType.BOOL, [])
    node = ir.node("If", [x], {"then_branch": branch, "else_branch": branch.clone()})
    assert why_not_captured(graph(node, x)) == "If 'y' is control flow"
    x = ir.val("x", ir.DataType.FLOAT, [8])
    assert why_not_captured(graph(ir.node("NonZero", [x]), x)) == "NonZero 'y' has as many elements as its data decide"


@pytest.mark.parametrize(
    ("operator", "attributes", "is_left"),
    [
        ("ArgMax", {}, False),
        ("ArgMax", {"select_last_index": 1}, True),
        ("ConvTranspose", {"pads": [1, 0, 1, 0]}, False),
        ("ConvTranspose", {"pads": [0, 0, 1, 1]}, True),
        ("LSTM", {"activations": ["Sigmoid", "Tanh", "Tanh"] * 2, "direction": "bidirectional"}, False),
        ("LSTM", {"activations": ["Sigmoid", "Relu", "Tanh"]}, True),
        ("LSTM", {"clip": 3.0}, True),
        ("LSTM", {"input_forget": 1}, True),
        ("GRU", {}, True),
        ("GRU", {"linear_before_reset": 1}, False),
        ("RNN", {"activations": ["Relu"]}, True),
    ],
)
def test_nodes_that_onnxruntime_leaves_to_the_cpu(operator: str, attributes: dict[str, Any], is_left: bool) -> None:
    """As an H200 showed. cuDNN lacks these forms."""
    node = ir.node(operator, [ir.val(name, ir.DataType.FLOAT, [4, 4]) for name in "xwr"], attributes)
    assert has_gpu_kernel(node, ir.DataType.FLOAT) != is_left


def test_peepholes_are_left_to_the_cpu() -> None:
    inputs = [ir.val(name, ir.DataType.FLOAT, [4, 4]) for name in "xwrblhcp"]
    assert has_gpu_kernel(ir.node("LSTM", inputs[:7]), ir.DataType.FLOAT)
    assert not has_gpu_kernel(ir.node("LSTM", inputs), ir.DataType.FLOAT)


def test_arithmetic_on_sizes_needs_no_kernel() -> None:
    """ReduceProd of int64 has none for GPUs."""
    x = ir.val("x", ir.DataType.FLOAT, ["n", 8])
    sizes = ir.node("Shape", [x])
    count = ir.node("ReduceProd", [sizes.outputs[0]], {"keepdims": 1})
    flat = ir.node("Reshape", [x, count.outputs[0]])
    for node in (sizes, count):
        node.outputs[0].type = ir.TensorType(ir.DataType.INT64)
    assert why_not_captured(ir.Graph([x], flat.outputs, nodes=[sizes, count, flat])) == ""
    whole = ir.val("whole", ir.DataType.INT64, ["n", 8])
    count = ir.node("ReduceProd", [whole], {"keepdims": 1})
    assert "has no kernel" in why_not_captured(ir.Graph([whole], count.outputs, nodes=[count]))


def test_sizes_that_are_numbers_need_no_node() -> None:
    """ONNX Runtime computes them once, as it loads the graph."""
    x = ir.val("x", ir.DataType.FLOAT, [4, 8])
    sizes = ir.node("Shape", [x])
    whole = ir.node("Cast", [sizes.outputs[0]], {"to": ir.DataType.FLOAT})
    negative = ir.node("Neg", [x])
    made = ir.node("Add", [negative.outputs[0], whole.outputs[0]])
    graph = ir.Graph([x], made.outputs, nodes=[sizes, whole, negative, made])
    assert place_values(graph).to_gpu == ()
    x.shape = ir.Shape(["n", 8])
    assert [read.number for read in place_values(graph).to_gpu] == [1]


def test_before_opset_11_there_is_no_range(tmp_path: Path) -> None:
    model, _ = written(tmp_path, scaled)
    graph = ir.load(model).graph
    graph.opset_imports[""] = 10
    before = [node.op_type for node in graph]
    keep_on_gpu(graph, {})
    assert [node.op_type for node in graph] == before


def test_sizes_that_meet_again_are_followed_once() -> None:
    """Each sum reads the one before twice, so there are 2 ** 60 ways to the last one."""
    x, given = ir.val("x", ir.DataType.FLOAT, ["n", 8]), ir.val("given", ir.DataType.INT64, [2])
    nodes = [ir.node("Shape", [x]), ir.node("Neg", [x])]
    nodes.append(ir.node("Add", [given, nodes[0].outputs[0]]))
    for _ in range(60):
        nodes.append(ir.node("Add", [nodes[-1].outputs[0]] * 2))
    nodes.append(ir.node("Mul", [nodes[1].outputs[0], nodes[-1].outputs[0]]))
    graph = ir.Graph([x, given], nodes[-1].outputs, nodes=nodes, opset_imports={"": 17})
    (read,) = place_values(graph).fed
    assert read.value is given
    keep_on_gpu(graph, {})
