from __future__ import annotations

import onnx_ir as ir
import pytest

from splitc.compiler.graphs.node_key import node_key


def constant(*elements: float | bytes) -> ir.Node:
    texts = [element for element in elements if isinstance(element, bytes)]
    tensor = (
        ir.StringTensor(texts, shape=ir.Shape([len(texts)]), name="any")
        if texts
        else ir.tensor(list(elements), name="any")
    )
    return ir.node("Constant", [], {"value": tensor})


@pytest.mark.parametrize(
    ("one", "other"), [((1.0, 2.0), (1.0, 3.0)), ((1, 2), (1.0, 2.0)), ((b"a", b"b"), (b"a", b"c"))]
)
def test_nodes_are_told_apart_by_the_elements_of_their_tensors(
    one: tuple[float | bytes, ...], other: tuple[float | bytes, ...]
) -> None:
    assert node_key(constant(*one)) == node_key(constant(*one)) != node_key(constant(*other))


def test_node_with_a_graph_is_compared_with_no_other() -> None:
    branch = ir.Graph([], [], nodes=[])
    assert node_key(ir.node("If", [None], {"then_branch": branch, "else_branch": branch})) is None
