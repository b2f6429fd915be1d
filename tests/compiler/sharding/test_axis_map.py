"""Axis rules of nodes in a model: also rules that fail, by the model's fault or splitc's, and costly ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest

from models.writer import save
from splitc.compiler import Request, plan_model
from splitc.compiler.analysis.facts import analyze
from splitc.compiler.errors import ModelError
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators import registry
from splitc.compiler.operators.axes import new_axis
from splitc.compiler.operators.operation import Operation
from splitc.compiler.operators.operator import Operator
from splitc.compiler.request.shapes import AskedShapes
from splitc.compiler.sharding.axis_map import find_axes, relate_node
from tests.helpers.blocks import Block
from tests.helpers.operators import softmax


def transpose(**attributes: object) -> Operation:
    """A Transpose of an array of 2 x 3."""
    x = ir.Value(name="x", shape=ir.Shape([2, 3]), type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.node("Transpose", [x], attributes, name="t")  # type: ignore[arg-type]
    node.outputs[0].name = "y"
    ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 17})
    axes = [new_axis(2), new_axis(3)]
    return Operation(node, [tuple(axes)], [tuple(axes[::-1])], [None])


@pytest.mark.parametrize("attributes", [{"perm": [0, 7]}, {"perm": 3}, {"perm": ["a", "b"]}])
def test_node_that_contradicts_itself(attributes: dict[str, object]) -> None:
    with pytest.raises(
        ModelError, match=r"node 't' \(Transpose\): its attributes and the shapes .* contradict: .*perm"
    ):
        relate_node(transpose(**attributes))


@pytest.mark.parametrize("kind", [IndexError, KeyError, TypeError, ValueError, ZeroDivisionError])
def test_rule_that_is_wrong_is_no_fault_of_the_model(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def rule(operation: Operation) -> None:
        raise kind("a fault of ours")

    monkeypatch.setattr(registry, "operator_of", lambda node: Operator("Transpose", rule))
    with pytest.raises(kind, match="a fault of ours"):
        relate_node(transpose(perm=[1, 0]))


def test_what_is_computed_once_takes_no_sum(tmp_path: Path) -> None:
    """As with the positions of an image, which engines fold: each run would have to sum them."""
    b = Block()
    x = softmax(b, b.data("x", (8, 64), ["n", 64]))
    positions = softmax(b, b.op("MatMul", b.w("grid", 8, 2), b.w("P", 2, 64)))
    wide = b.op("Relu", b.op("MatMul", x, b.w("A", 64, 128)))
    b.give(softmax(b, b.op("Add", positions, b.op("MatMul", wide, b.w("B", 128, 64)))), shape=["n", 64])
    model = tmp_path / "model.onnx"
    save(b.model(), model)
    plan = plan_model(model, ["cpu0", "cpu1"], Request(split_mode="tensor", shapes={"x": (8, 64)}))
    found = {weight.name: weight for weight in plan.weights}
    assert found["A"].split and not found["P"].split
    assert "it is folded when an engine is loaded" in (found["P"].reason or "")


def test_axes_are_known_behind_a_pad_that_fusion_added(tmp_path: Path) -> None:
    """Its list of a constant and a computed number was not there when sizes were tried."""
    path = tmp_path / "model.onnx"
    text = """<ir_version: 8, opset_import: ["" : 18]> g (float[n, 8, k] x, float[m] room) => (float y)
        <int64[5] zeros = {0, 0, 0, 0, 0}> { rows = Shape (room)  before = Shape <start = 2> (x)
        lacking = Sub (rows, before)  pads = Concat <axis = 0> (zeros, lacking)  y = Pad (x, pads) }"""
    ir.save(ir.from_onnx_text(text), path)
    analysis = analyze(path, AskedShapes({"x": (2, 8, 3), "room": (7,)}), 1)
    bound = replace(analysis.costs.bound, mixed={}, constants={})
    axis_map = find_axes(analysis.graph, bound)
    (pad,) = [operation for operation in axis_map.operations.values() if operation.node.op_type == "Pad"]
    _, heads, columns = zip(pad.input(0), pad.output(), strict=True)
    assert list(ax.atoms(heads[0])) == list(ax.atoms(heads[1]))
    assert not any(atom.pinned for atom in ax.atoms(heads[0]))
    assert all(atom.pinned for atom in ax.atoms(columns[0]))
