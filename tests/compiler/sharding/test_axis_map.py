"""A rule that fails: for a node that contradicts itself, by the model's fault, or for any other, by ours."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from splitc.compiler.model_errors import ModelError
from splitc.compiler.operators import registry
from splitc.compiler.operators.axes import new_axis
from splitc.compiler.operators.operation import Operation
from splitc.compiler.operators.operator import Operator
from splitc.compiler.sharding.axis_map import relate_node


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
