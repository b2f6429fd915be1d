"""What a rank's graph says of values, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.lowering.communication import use_operators
from splitc.runtime import Session
from tests.conftest import assert_close, run_whole
from tests.helpers.blocks import FLOAT, Block, check_rows, check_split
from tests.helpers.operators import HIDDEN, INNER, number, softmax


def feed_forward(b: Block, x: ir.Value, first: str, second: str) -> ir.Value:
    inner = b.op("Relu", b.op("MatMul", softmax(b, x), b.w(first, HIDDEN, INNER)))
    return b.op("MatMul", inner, b.w(second, INNER, HIDDEN))


def branch(name: str, scale: float, read: ir.Value, shape: tuple[int, ...]) -> ir.Graph:
    """A graph that scales a value of the graph around it."""
    factor = ir.Value(
        name=f"{name}.factor", type=ir.TensorType(FLOAT), shape=ir.Shape([]), const_value=ir.tensor(scale)
    )
    node = ir.node("Mul", [read, factor])
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = name, ir.TensorType(FLOAT), ir.Shape(shape)
    return ir.Graph([], node.outputs, nodes=[node], initializers=[factor], name=name)


@pytest.mark.parametrize("verify", [True, False])
def test_sum_that_only_branches_read(verify: bool, tmp_path: Path) -> None:
    """A rank that gives no output has no If, and takes part in the sum all the same."""
    b = Block()
    shape = (2, 5, HIDDEN)
    summed = feed_forward(b, b.data("x", shape), "A", "B")
    flag = b.op("Greater", b.op("ReduceMax", b.data("z", (3,)), keepdims=0), number(b, 0))
    ways = {f"{way}_branch": branch(way, scale, summed, shape) for way, scale in (("then", 2.0), ("else", 3.0))}
    b.give(b.op("ReduceMax", b.op("If", flag, **ways), axes=[1], keepdims=0), shape=[2, HIDDEN])
    save(b.model(), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["3xcpu"], Request(split_mode="tensor", memory=["1GiB"]))
    compile_model(plan, tmp_path / "package", verify=verify)
    with Session(tmp_path / "package") as session:
        assert_close(session.run(b.feeds), run_whole(tmp_path / "model.onnx", b.feeds))


@pytest.mark.parametrize("mode", ["row", "tensor"])
def test_every_exchange_takes_a_token(mode: str, tmp_path: Path) -> None:
    """On GPUs ONNX Runtime moves nodes to the CPU that take only what is made there, or up to 100 constant numbers."""
    b = Block()
    b.give(feed_forward(b, b.data("x", (2, 5, HIDDEN)), "A", "B"), shape=[2, 5, HIDDEN])
    save(b.model(), tmp_path / "model.onnx")
    row_min = 8 if mode == "row" else 256
    request = Request(split_mode=mode, memory=["1GiB"], engine="onnxruntime", row_min=row_min)
    compile_model(plan_model(tmp_path / "model.onnx", ["2xcuda"], request), tmp_path / "package", verify=False)
    for path in (tmp_path / "package").glob("rank*/*.onnx"):
        graph = ir.load(path).graph
        first = graph.initializers["splitc_first"]
        exchanges = [node for node in graph if node.domain == "splitc"]
        tokens = {first, *(node.outputs[-1] for node in exchanges)}
        assert exchanges
        assert all(tokens & set(node.inputs) for node in exchanges)
        assert first.const_value is not None and first.const_value.size > 100


def running_sum(b: Block, x: ir.Value) -> ir.Value:
    """By a Scan over the places of [5, 12], whose body needs the number of axes of what it is given."""
    total, step = (ir.Value(name=name, type=ir.TensorType(FLOAT)) for name in ("total", "step"))
    after = ir.node("Add", [total, step])
    given = ir.node("Tanh", [after.outputs[0]])
    for node, name in ((after, "after"), (given, "given")):
        node.outputs[0].name, node.outputs[0].type = name, ir.TensorType(FLOAT)
    body = ir.Graph([total, step], [after.outputs[0], given.outputs[0]], nodes=[after, given], name="body")
    return b.ops("Scan", b.op("ReduceMean", x, b.ints(0), keepdims=0), x, outputs=2, body=body, num_scan_inputs=1)[1]


def with_scans(b: Block) -> ir.Value:
    x = b.data("x", (5, HIDDEN), ["t", HIDDEN])
    for layer in range(4):
        y = feed_forward(b, x, f"A{layer}", f"B{layer}")
        # A size that only the numbers of a computed shape tell.
        zeros = b.op("ConstantOfShape", b.op("Shape", y), value=ir.tensor([0.0]))
        x = b.op("Add", x, running_sum(b, b.op("Max", y, zeros)))
    return x


@pytest.mark.parametrize("mode", ["layer", "tensor", "row"])
def test_scan_of_what_comes_from_another_rank(mode: str, tmp_path: Path) -> None:
    b = Block(opset=18)
    b.give(with_scans(b), shape=["t", HIDDEN])
    save(b.model(), tmp_path / "model.onnx")
    request = Request(split_mode=mode, memory=["1GiB"])
    plan = plan_model(tmp_path / "model.onnx", ["3xcpu"], replace(request, row_min=2) if mode == "row" else request)
    compile_model(plan, tmp_path / "package", verify=False)
    with Session(tmp_path / "package") as session:
        assert_close(session.run(b.feeds), run_whole(tmp_path / "model.onnx", b.feeds))


def test_symbol_of_a_sharded_size_is_left_out(tmp_path: Path) -> None:
    """Two axes of one name and size, of which ranks have different shards: their values may not share a buffer."""
    b = Block()
    x = softmax(b, b.data("x", (2, 5, HIDDEN), ["n", "t", HIDDEN]))
    made = []
    for first, second in ("AB", "CD"):
        wide = b.op("MatMul", x, b.w(first, HIDDEN, INNER + 1))
        wide.shape, wide.type = ir.Shape(["n", "t", "width"]), ir.TensorType(FLOAT)
        inner = b.op("Relu", wide)
        inner.shape, inner.type = wide.shape, wide.type
        made.append(b.op("MatMul", inner, b.w(second, INNER + 1, HIDDEN)))
    b.give(softmax(b, b.op("Sub", *made)))
    plan, *_ = check_split(b, tmp_path, "ABCD", [(1, 1)])
    values = [value for graph in plan.program(0).graphs for node in graph for value in node.outputs if value.shape]
    sizes = {str(size) for value in values for size in value.shape or ()}
    assert {"n", "t"} <= sizes
    assert "width" not in sizes


def widened(b: Block, weight: ir.Value) -> ir.Value:
    return b.op("Cast", weight, to=FLOAT)


def turned(b: Block, weight: ir.Value) -> ir.Value:
    return b.op("Transpose", weight, perm=[1, 0])


@pytest.mark.parametrize("how", [widened, turned])
def test_what_is_folded_from_a_weight_of_several_rounds_is_one_node(
    how: Callable[[Block, ir.Value], ir.Value], tmp_path: Path
) -> None:
    b = Block()
    shared = how(
        b, b.weight("A", ir.tensor(b.random("A", 16, 16).astype(np.float16 if how is widened else np.float32)))
    )
    x = b.data("x", (10, 16), ["n", 16])
    for _ in range(3):
        x = b.op("Relu", b.op("MatMul", x, shared))
    b.give(x, shape=["n", 16])
    (plan,) = check_rows(b, tmp_path, "A", [(1, 1)], rounds=3)
    kind = "Cast" if how is widened else "Transpose"
    for rank in range(2):
        (graph,) = plan.program(rank).graphs
        assert [node.op_type for node in graph].count(kind) == 1


def test_rows_and_sections_that_are_one_axis(tmp_path: Path) -> None:
    """Its size follows the rows of each request, though some of each section is split."""
    b = Block()
    x = b.data("x", (2, HIDDEN), ["n", HIDDEN])
    rows = b.op("Slice", b.op("Shape", x), b.ints(0), b.ints(1))
    wide = b.op("MatMul", x, b.w("W", HIDDEN, 2 * INNER))
    flat = b.op("Tanh", b.op("Reshape", wide, b.op("Mul", rows, b.ints(2 * INNER))))
    again = b.op("Reshape", flat, b.op("Concat", rows, b.ints(2 * INNER), axis=0))
    gate, up = b.ops("Split", again, b.ints(INNER, INNER), outputs=2, axis=1)
    b.give(b.op("MatMul", b.op("Mul", gate, up), b.w("V", INNER, HIDDEN)), shape=["n", HIDDEN])
    save(b.model(), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["3xcpu"], Request(split_mode="tensor", memory=["1GiB"]))
    assert {weight.name for weight in plan.weights if weight.split} >= {"W", "V"}
    compile_model(plan, tmp_path / "package", verify=False)
    with Session(tmp_path / "package") as session:
        for count in (1, 2, 9):
            feeds = {"x": np.random.default_rng(count).standard_normal((count, HIDDEN), np.float32)}
            assert_close(session.run(feeds), run_whole(tmp_path / "model.onnx", feeds))


@pytest.mark.parametrize("kind", ["MatMul", "RMSNormalization"])
def test_rank_without_units_of_a_sum_adds_zeros_where_it_overflows(kind: str, tmp_path: Path) -> None:
    """It multiplied its copy by zero, and inf x 0 is NaN: so was the sum of all ranks."""
    b = Block(23)
    large = [
        b.weight(name, ir.tensor(np.full(shape, 1e20, np.float32))) for name, shape in (("A", (64, 2)), ("B", (2, 64)))
    ]
    x = b.op("MatMul", b.data("x", (4, 64)), large[0])
    y = b.op(kind, x, large[1] if kind == "MatMul" else b.w("scale", 2))
    b.give(y, shape=[4, None])
    save(b.model(), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["3xcpu"], Request(split_mode="tensor", memory=["1GiB"]))
    compile_model(plan, tmp_path / "package", verify=False)
    feeds = {"x": np.ones((4, 64), np.float32)}
    with Session(tmp_path / "package") as session:
        found, expected = session.run(feeds), run_whole(tmp_path / "model.onnx", feeds)
    np.testing.assert_array_equal(found["y"], expected["y"])


def test_value_that_another_rank_returns_is_no_output() -> None:
    """Fusions leave outputs as they are, so a value that is no longer one must not be taken for one."""
    x = ir.val("x", FLOAT, [1])
    first = ir.node("Relu", [x])
    last = ir.node("Neg", [first.outputs[0]])
    first.outputs[0].name, last.outputs[0].name = "inner", "y"
    graph = use_operators(ir.Graph([x], [first.outputs[0], last.outputs[0]], nodes=[first, last]), {"y"})
    assert [value.name for value in graph.outputs] == ["y"]
    assert not first.outputs[0].is_graph_output() and last.outputs[0].is_graph_output()
