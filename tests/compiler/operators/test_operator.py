"""What an entry says of its operator's costs, sizes and splits, tested by its effects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from models.writer import save
from splitc.compiler import Request, plan_model
from splitc.compiler.analysis.costs import Costs, Speed
from splitc.compiler.analysis.facts import analyze
from splitc.compiler.inference.folding import fold_shapes
from splitc.compiler.inference.shapes import infer_shapes
from splitc.compiler.lowering.rank_forms import COLLECTIVE
from splitc.compiler.lowering.rank_graph import rank_graph
from splitc.compiler.lowering.segments import cut_segments
from splitc.compiler.nodes import operator_name
from splitc.compiler.planning.clock import Clock
from splitc.compiler.request.shapes import AskedShapes
from splitc.compiler.states.states import find_states
from splitc.runtime.hardware.devices import Device
from splitc.runtime.hardware.machine import Machine
from splitc.runtime.hardware.profiles import PROFILES
from tests.compiler.operators import (
    test_attention,
    test_indexing,
    test_linear,
    test_qlinear,
    test_quantized,
    test_tabular,
)
from tests.conftest import whole_session
from tests.helpers.blocks import FLOAT, INT, Block, sharded
from tests.helpers.graphs import read_graph
from tests.helpers.operators import HIDDEN, Middle, having, sandwich, through


def nodes_of(graph: ir.Graph, name: str) -> list[ir.Node]:
    return [node for node in graph if operator_name(node) == name]


# Folding

OF_TWO = ["Add", "Sub", "Mul", "Mod", "Max", "Min", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"]
OF_ONE = [
    "Abs",
    "Neg",
    "Identity",
    "Cast",
    "ReduceSum",
    "ReduceMax",
    "ReduceMin",
    "ReduceProd",
    "Shape",
    "Sign",
    "Size",
]
A, B, YES, NO, HALF = [7, -3, 4], [2, 4, -5], [True, False], [True, True], np.array([1.5, 4.0], np.float32)
FOLDED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(OF_TWO, (A, B)),
    **dict.fromkeys(OF_ONE, (A,)),
    **dict.fromkeys(["Ceil", "Exp", "Floor", "Log", "Reciprocal", "Round", "Sqrt"], (HALF,)),
    "Pow": (HALF, HALF),
    **dict.fromkeys(["And", "Or", "Xor"], (YES, NO)),
    "Not": (YES,),
    "Clip": (A, -2, 5),
    "Div": ([8, 9, 15], [2, 4, 5]),
    "Where": ([True, False, True], A, B),
    "Range": (2, 11, 3),
    "Gather": (A, [2, 0]),
    "NonZero": ([3, 0, 1],),
    "Reshape": ([1, 2, 3, 4], [2, -1]),
    "Flatten": ([[1, 2], [3, 4]],),
    "Squeeze": ([[1, 2]], [0]),
    "Unsqueeze": (A, [0, 2]),
    "Transpose": ([[1, 2], [3, 4]],),
    "Expand": ([[1], [2]], [1, 3]),
    "Tile": (A, [2]),
    "OneHot": ([1, 0], [3], [5, 7]),
    "ConstantOfShape": ([2, 3],),
    "Concat": (A, B),
    "Split": ([1, 2, 3, 4],),
    "Slice": (A, [-2], [2**31], [0]),
}
ATTRIBUTES: dict[str, Mapping[str, Any]] = {
    "Cast": {"to": FLOAT},
    "Concat": {"axis": 0},
    "ConstantOfShape": {"value": ir.tensor([7])},
    "Flatten": {"axis": 2},
    "Shape": {"start": -1},
    **{name: {"axes": [0], "keepdims": 0} for name in ("ReduceMax", "ReduceMin", "ReduceProd")},
}


def test_each_operator_that_folds_is_tried() -> None:
    assert FOLDED.keys() == set(having("shape_arithmetic"))


@pytest.mark.parametrize("name", FOLDED)
def test_folded_sizes_are_those_of_onnx_runtime(name: str) -> None:
    """The folded values are those that ONNX Runtime computes."""
    b = Block()
    inputs = [b.weight(f"x{place}", ir.tensor(np.asarray(content))) for place, content in enumerate(FOLDED[name])]
    made = b.ops(name, *inputs, outputs=2 if name == "Split" else 1, **ATTRIBUTES.get(name, {}))
    model = b.model()
    assert fold_shapes(model.graph) == 1
    for place, value in enumerate(made):
        assert value.const_value is not None
        folded = value.const_value.numpy()
        value.type, value.const_value = ir.TensorType(ir.DataType.from_numpy(folded.dtype)), None
        model.graph.outputs.append(value)
        content = ir.to_proto(model).SerializeToString()
        expected = whole_session(content).run(None, {})[place]
        assert folded.dtype == expected.dtype
        np.testing.assert_array_equal(folded, expected)


@pytest.mark.parametrize("name", [*having("expands"), "Add"])
def test_what_expands_is_handed_over_and_other_sizes_are_computed_again(name: str) -> None:
    """In the segments of a rank's graph."""
    x = ir.Value(name="x", type=ir.TensorType(FLOAT), shape=ir.Shape(["n", 4]))
    constants = [
        ir.Value(name=key, type=ir.TensorType(INT), shape=ir.Shape([]), const_value=ir.tensor(1, name=key))
        for key in ("one", "step")
    ]
    sizes = ir.node("Shape", [x])
    others = {"Range": [*constants], "ConstantOfShape": []}.get(name, constants[:1])
    made = ir.node(name, [sizes.outputs[0], *others])
    before = ir.node("Reader", [x, made.outputs[0]])
    joint = ir.node(COLLECTIVE, [before.outputs[0]])
    after = ir.node("Reader", [joint.outputs[0], made.outputs[0]])
    nodes = [sizes, made, before, joint, after]
    for place, node in enumerate(nodes):
        node.outputs[0].name = f"v{place}"
    graph = ir.Graph([x], after.outputs, nodes=nodes, initializers=constants, opset_imports={"": 17})
    counts = [
        len(nodes_of(segment.graph, name)) for segment in cut_segments(graph, ["v4"], nodes_of(graph, COLLECTIVE))
    ]
    assert counts == ([1, 0] if name != "Add" else [1, 1])


def cast(b: Block, sizes: ir.Value) -> ir.Value:
    """The sizes, cast twice: a view right behind another one that it reverts would be bypassed."""
    return b.op("Cast", b.op("Cast", sizes, to=ir.DataType.INT32), to=INT)


PASSED: dict[str, Middle] = {
    "Identity": through("Identity"),
    "Cast": cast,
    "Gather": lambda b, sizes: b.op("Gather", sizes, b.ints(0, 1, 2)),
    "Reshape": lambda b, sizes: b.op("Squeeze", cast(b, b.op("Reshape", sizes, b.ints(1, 3))), b.ints(0)),
    "Squeeze": lambda b, sizes: b.op("Squeeze", cast(b, b.op("Unsqueeze", sizes, b.ints(1))), b.ints(1)),
    "Unsqueeze": lambda b, sizes: b.op("Squeeze", cast(b, b.op("Unsqueeze", sizes, b.ints(1))), b.ints(1)),
    "Concat": lambda b, sizes: b.op("Concat", *(b.op("Gather", sizes, b.ints(place)) for place in range(3)), axis=0),
    "Slice": lambda b, sizes: b.op(
        "Concat", *(b.op("Slice", sizes, b.ints(place), b.ints(place + 1)) for place in range(3)), axis=0
    ),
}
# Operators that are given sizes as inputs, for which the sizes that they read are corrected.
TOLD_SIZES = {"Reshape", "Slice"}


@pytest.mark.parametrize("name", having("passes_sizes"))
def test_sizes_of_a_shard_are_passed_on(name: str, tmp_path: Path) -> None:
    """From a Shape to a Reshape, without arithmetic that makes them sizes of the whole in between."""

    def middle(b: Block, v: ir.Value) -> ir.Value:
        sizes = b.op("Concat", PASSED[name](b, b.op("Shape", v)), b.ints(1), axis=0)
        return b.op("Squeeze", b.op("Tanh", b.op("Reshape", v, sizes)), b.ints(-1))

    sandwich(middle).check(tmp_path)
    plan = plan_model(tmp_path / "block.onnx", ["2xcpu"], Request(split_mode="tensor"))
    graph = rank_graph(sharded(plan), plan.ranks[1].stage, 1)
    assert bool(nodes_of(graph, name)) == (name != "Identity")  # the normal form has none here
    assert bool(nodes_of(graph, "Where")) == (name in TOLD_SIZES)


# Costs


def costs_of(block: Block, folder: Path) -> Costs:
    save(block.model(), folder / "model.onnx")
    shapes = {name: array.shape for name, array in block.feeds.items()}
    return analyze(folder / "model.onnx", AskedShapes(shapes), 1).costs


PARTS: dict[str, Middle] = {
    "Gather": lambda b, v: b.op("Gather", v, b.ints(1, 2)),
    "GatherElements": lambda b, v: b.op("GatherElements", v, b.constant([[0] * HIDDEN], np.int64)),
    "GatherND": lambda b, v: b.op("GatherND", v, b.constant([[[0, 0]], [[1, 0]]], np.int64)),
    "Slice": lambda b, v: b.op("Slice", v, b.ints(0), b.ints(2)),
    "Shape": through("Shape"),
    "ReduceSum": lambda b, v: b.op("ReduceSum", v, b.ints(0)),
}


@pytest.mark.parametrize("name", [*having("reads_part"), "ReduceSum"])
def test_time_of_what_reads_a_part(name: str, tmp_path: Path) -> None:
    """The time does not depend on the table's length, unless the table is read whole."""
    seconds = []
    for rows in (20, 2000):
        b = Block()
        made = PARTS[name](b, b.data("x", (rows, HIDDEN), ["rows", HIDDEN]))
        b.give(b.op("Neg", made), dtype=INT if name == "Shape" else FLOAT, shape=["?"] * (1 if name == "Shape" else 2))
        costs = costs_of(b, tmp_path)
        (node,) = nodes_of(costs.graph.graph, name)
        seconds.append(costs.seconds(node, Speed(1e30, 1.0)))
    assert (seconds[0] == seconds[1]) == (name != "ReduceSum")


def test_time_by_the_roofline_model(tmp_path: Path) -> None:
    """The longer of computing and moving bytes, plus the exposed part of the shorter."""
    b = Block()
    b.give(b.op("Neg", b.data("x", (4, HIDDEN))), dtype=FLOAT, shape=[4, HIDDEN])
    costs = costs_of(b, tmp_path)
    (node,) = nodes_of(costs.graph.graph, "Neg")
    elements = 4 * HIDDEN  # each is one operation, read and written in four bytes
    assert costs.seconds(node, Speed(flops=1.0, bytes=1.0)) == 8 * elements
    assert costs.seconds(node, Speed(flops=0.1, bytes=1.0)) == 10 * elements
    assert costs.seconds(node, Speed(flops=0.1, bytes=1.0, exposed=0.5)) == 14 * elements


def test_time_to_read_a_weight_that_was_turned(tmp_path: Path) -> None:
    """Engines turn it when they load. A product reads the result as it reads any weight."""
    b = Block()
    x, plain, turned = b.data("x", (4, HIDDEN)), b.w("A", HIDDEN, HIDDEN), b.w("B", HIDDEN, HIDDEN)
    for name, weight in (("y", plain), ("z", b.op("Transpose", turned, perm=[1, 0]))):
        b.give(b.op("MatMul", x, weight), name, dtype=FLOAT, shape=[4, HIDDEN])
    costs = costs_of(b, tmp_path)
    plain_product, turned_product = nodes_of(costs.graph.graph, "MatMul")
    took = [costs.seconds(node, Speed(flops=1e30, bytes=1.0)) for node in (plain_product, turned_product)]
    assert took == [4 * (2 * 4 * HIDDEN + HIDDEN * HIDDEN)] * 2


def test_time_on_gpus_by_passes(tmp_path: Path) -> None:
    """A convolution's bias is one of its own, which reads and writes the output; a norm of groups takes several."""
    b = Block()
    image = b.data("x", (1, 2, 4, 4))
    weight, bias, scale = b.w("w", 2, 2, 1, 1), b.w("bias", 2), b.w("scale", 2)
    made = [b.op("Conv", image, weight), b.op("Conv", image, weight, bias)]
    made.append(b.op("InstanceNormalization", image, scale, bias))
    for number, value in enumerate(made):
        b.give(value, f"y{number}", dtype=FLOAT, shape=[1, 2, 4, 4])
    costs = costs_of(b, tmp_path)
    plain, biased, normed = (node for node in costs.graph.nodes if node.op_type != "Constant")
    seconds = {
        node: [costs.seconds(node, Speed(1e30, 1.0, is_gpu=is_gpu)) for is_gpu in (False, True)]
        for node in (plain, biased, normed)
    }
    size = 2 * 4 * 4 * 4
    assert seconds[plain] == [2 * size + 16] * 2
    assert seconds[biased] == [2 * size + 24, 4 * size + 24]
    assert seconds[normed] == [2 * size + 16, 4 * (2 * size + 16)]


VIEWS: dict[str, Middle] = {
    "Identity": through("Identity"),
    "Reshape": lambda b, v: b.op("Reshape", v, b.ints(0, -1)),
    "Flatten": through("Flatten"),
    "Squeeze": lambda b, v: b.op("Squeeze", v, b.ints(1)),
    "Unsqueeze": lambda b, v: b.op("Unsqueeze", v, b.ints(1)),
    "Neg": through("Neg"),
}


@pytest.mark.parametrize("name", [*having("is_view"), "Neg"])
def test_view_takes_no_kernel(name: str, tmp_path: Path) -> None:
    b = Block()
    b.give(b.op("Relu", VIEWS[name](b, b.op("Tanh", b.data("x", (2, 1, HIDDEN))))), shape=None)
    save(b.model(), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["cpu0"])
    rank = replace(plan.ranks[0], device=Device("cuda", 0))
    clock = Clock(plan.analysis, [rank], Machine(), 1)
    took = clock.seconds(rank, nodes_of(plan.analysis.graph.graph, name), 1)
    assert (took < PROFILES["cuda"].launch) == (name != "Neg")


@pytest.mark.parametrize("name", having("dequantizes"))
def test_weight_that_is_unpacked_is_kept_as_it_is(name: str, tmp_path: Path) -> None:
    """It is computed from weights alone, but in each run."""
    tiny = test_quantized.GRAPHS[name]
    save(tiny.build().model(), tmp_path / "model.onnx")
    graph = read_graph(tmp_path / "model.onnx")
    nodes = set(nodes_of(graph.graph, name))
    assert nodes
    assert nodes <= graph.constant
    assert not nodes & graph.folded


# Splits


# For operators other than attention see tests/runtime/requests/test_sequence.py.
IN_PLACE = sorted({*having("writes_in_place")} & {*having("is_attention")} - test_attention.WITHOUT_KERNEL)


@pytest.mark.parametrize("name", [*IN_PLACE, "com.microsoft.MultiHeadAttention"])
def test_state_is_written_in_place(name: str, tmp_path: Path) -> None:
    b = Block()
    width, head = 4 * 16, 16
    query, key, value = (b.data(part, (1, 5, width), ["n", "t", width]) for part in ("query", "key", "value"))
    pasts = [b.data(f"past_{n}", (1, 4, 3, head), ["n", 4, "p", head]) for n in "kv"]
    inputs: list[ir.Value | None] = [query, key, value]
    if name in IN_PLACE:
        inputs += [*pasts, b.constant([7], np.int32), b.constant(8, np.int32)]
        heads = {"num_heads": 4, "kv_num_heads": 4}
    else:
        inputs += [None, None, None, *pasts]
        heads = {"num_heads": 4}
    out, *presents = b.ops(name, *inputs, outputs=3, **heads)
    b.give(b.op("MatMul", out, b.w("o", width, HIDDEN)), shape=["n", "t", HIDDEN])
    for present, part in zip(presents, "kv"):
        b.give(present, f"present_{part}", ["n", 4, "s", head])
    save(b.model(), tmp_path / "model.onnx")
    graph = read_graph(tmp_path / "model.onnx")
    infer_shapes(graph.model)
    states = find_states(graph)
    assert [state.input for state in states] == ["past_k", "past_v"]
    assert [state.in_place for state in states] == [name in IN_PLACE] * 2


@pytest.mark.parametrize("name", having("scaling_attributes"))
def test_factor_of_an_input_goes_with_it(name: str, tmp_path: Path) -> None:
    """One rank adds the bias times beta; the other has neither."""
    tiny = test_linear.GRAPHS[name]
    save(tiny.build().model(), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode="tensor"))
    products = [nodes_of(rank_graph(sharded(plan), plan.ranks[rank].stage, rank), name)[-1] for rank in (0, 1)]
    given = [(len(node.inputs), "beta" in node.attributes) for node in products]
    assert given == [(3, True), (2, False)]


@pytest.mark.parametrize("name", having("shapes"))
def test_shape_functions_agree_with_onnx_runtime(name: str, tmp_path: Path) -> None:
    """They are those of ONNX Runtime. A size that depends on data has a symbol that no input has."""
    families = (test_indexing, test_linear, test_qlinear, test_quantized, test_tabular)
    graphs = {name: graph for family in families for name, graph in family.GRAPHS.items()}
    b = graphs[name].build()
    model = b.model()
    assert infer_shapes(model) == frozenset()
    made = [value for node in nodes_of(model.graph, name) for value in node.outputs if value.name]
    inferred = [(value.dtype, value.shape) for value in made]
    model.graph.outputs.extend(value for value in made if not value.is_graph_output())
    names = [value.name for value in made]
    session = whole_session(ir.to_proto(model).SerializeToString())
    given = ((value.shape or (), b.feeds[value.name or ""].shape) for value in model.graph.inputs)
    sizes = {str(size): number for sizes, numbers in given for size, number in zip(sizes, numbers)}
    for array, (dtype, shape) in zip(session.run(names, b.feeds), inferred, strict=True):
        assert dtype == ir.DataType.from_numpy(array.dtype)
        assert shape is not None
        assert len(shape) == array.ndim
        known = [size if isinstance(size, int) else sizes.get(str(size)) for size in shape]
        assert all(size in (None, n) for size, n in zip(known, array.shape)), (known, array.shape)
        assert None not in known or name == "Unique"


@pytest.mark.parametrize(
    "name", [name for name in having("shapes") if name in test_tabular.GRAPHS and "Imputer" not in name]
)
def test_type_is_known_where_the_shape_is_not(name: str) -> None:
    """Nothing else infers the type, and a node of unknown type can't be tried."""
    model = test_tabular.GRAPHS[name].build().model()
    (node,) = nodes_of(model.graph, name)
    infer_shapes(model)
    assert node.inputs[0] is not None
    unknown = ir.Value(name="unknown", type=node.inputs[0].type)
    model.graph.inputs.append(unknown)
    node.replace_input_with(0, unknown)
    for made in node.outputs:
        made.type = None
    infer_shapes(model)
    assert node.outputs[0].shape is None
    assert all(made.dtype is not None for made in node.outputs if made.name)
