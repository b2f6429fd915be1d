"""Walks: each item once, nearest first, and no further than the step goes."""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.graphs.walks import ancestors, computed_from_weights, levels, producer_of, producers, reached

STEPS = {"a": "bc", "b": "d", "c": "db", "d": "a"}


def test_levels_are_by_distance() -> None:
    assert list(levels("a", STEPS.__getitem__)) == [["a"], ["b", "c"], ["d"]]


def test_reached_goes_no_further_than_asked() -> None:
    """A caller that stops early does not pay for the rest."""
    asked = []

    def step(item: int) -> list[int]:
        asked.append(item)
        return [item + 1]

    assert next(item for item in reached([0], step) if item == 2) == 2
    assert asked == [0, 1]


def test_ancestors_and_what_weights_alone_decide() -> None:
    x, weight = ir.Value(name="x"), ir.Value(name="w", const_value=ir.tensor([1.0], name="w"))
    folded = ir.node("Neg", [weight])
    drawn = ir.node("RandomNormalLike", [weight])
    product = ir.node("Mul", [x, folded.outputs[0]])
    other = ir.node("Add", [x, drawn.outputs[0]])
    nodes = [folded, drawn, product, other]
    graph = ir.Graph([x], [product.outputs[0], other.outputs[0]], nodes=nodes, initializers=[weight])
    reads = {node: tuple(value for value in node.inputs if value is not None) for node in graph}
    assert ancestors([product], reads.__getitem__) == {product, folded}
    assert computed_from_weights(reads, lambda node: node is drawn) == {folded}
    assert list(producers([x, None, weight, *other.inputs])) == [drawn]
    assert producer_of(product.outputs[0]) is product
