"""Finds Softmax, as one operator or decomposed, and the nodes that exporters write around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.graphs.matching import VIEWS, constant, is_onnx, list_of, readers_of, value_before
from splitc.compiler.graphs.walks import reached
from splitc.compiler.nodes import name_of
from splitc.compiler.patterns.operand import PASSED
from splitc.compiler.patterns.product import RankOf

# Operators between a reduction to one number for each row, and the use of that number.
_SPREADS = VIEWS | PASSED | {"Expand"}


@dataclass(frozen=True)
class Softmax:
    """exp(scores) / sum(exp(scores)). `is_last`: it is known to be along the last axis."""

    name: str
    scores: ir.Value
    output: ir.Value
    is_last: bool


def find_softmax(node: ir.Node, rank_of: RankOf, opset: int) -> Softmax | None:
    """The Softmax that a node is, or whose last node it is; None if there is none."""
    name = name_of(node)
    if is_onnx(node, "Softmax") and node.inputs[0] is not None:
        # Before opset 13 the default is axis 1, and all axes from there on count as one.
        axis = node.attributes.get_int("axis", -1 if opset >= 13 else 1)
        rank = rank_of(node.outputs[0])
        return Softmax(name, node.inputs[0], node.outputs[0], axis == -1 or (rank is not None and axis == rank - 1))
    return _find_written(node, name, rank_of) if is_onnx(node, "Div") else None


def _find_written(node: ir.Node, name: str, rank_of: RankOf) -> Softmax | None:
    """A decomposed Softmax that ends at a Div; None if there is none."""
    exponential, total = node.inputs
    scores, summed = value_before(exponential, "Exp"), _reduction(total, "ReduceSum", exponential)
    if scores is None or exponential is None or summed is None:
        return None
    return Softmax(name, scores, node.outputs[0], is_over_last(summed, rank_of(exponential)))


def is_row_maximum(value: ir.Value | None, scores: ir.Value) -> bool:
    """Whether a value is the maximum of each row of scores: subtracting it does not change the Softmax."""
    node = _reduction(value, "ReduceMax", scores)
    return node is not None and is_over_last(node, None)


def leaves_out_last(node: ir.Node, rank_of: RankOf) -> bool:
    """Whether a node is a Slice that drops just the last element of each row."""
    if not is_onnx(node, "Slice") or len(node.inputs) < 4:
        return False
    starts, ends, axes, *steps = (constant(value) for value in node.inputs[1:])
    rank = rank_of(node.outputs[0])
    return (starts, ends, *steps) in ((0, -1), (0, -1, 1)) and rank is not None and axes in (-1, rank - 1)


def _reduction(value: ir.Value | None, operator: str, data: ir.Value | None) -> ir.Node | None:
    """The reduction of these data that a value with one number for each row comes from; None if there is none."""
    node, rank = None if value is None else value.producer(), None
    while node is not None and not node.domain and not node.op_type.startswith("Reduce"):
        source = node.inputs[0] if node.op_type in _SPREADS else None
        if node.op_type == "Max" and constant(node.inputs[0]) is not None:
            source = node.inputs[1]
        if node.op_type in VIEWS:
            shape = node.outputs[0].shape
            if shape is None or not len(shape) or shape[-1] != 1:
                return None
            rank = len(shape)
        node = None if source is None else source.producer()
    if not is_onnx(node, operator) or data is None or node.inputs[0] is not data:
        return None
    keeps, shape = node.attributes.get_int("keepdims", 1), data.shape
    fits = (rank is None and keeps) or (shape is not None and len(shape) == rank)
    return node if fits else None


def is_over_last(node: ir.Node, rank: int | None) -> bool:
    """Whether a reduction is along the last axis alone."""
    axes = list_of(node, "axes") or ()
    if rank is None and node.inputs[0] is not None and node.inputs[0].shape is not None:
        rank = len(node.inputs[0].shape)
    return len(axes) == 1 and (axes[0] == -1 or (rank is not None and axes[0] == rank - 1))


def without_nan(value: ir.Value) -> ir.Value | None:
    """The result of replacing NaN in a value by zeros; None if the value has other readers."""
    users = readers_of(value)
    kinds = {node.op_type: node for node in users if not node.domain}
    if len(users) != 2 or kinds.keys() != {"IsNaN", "Where"}:
        return None
    where = kinds["Where"]
    asked, zero, kept = where.inputs
    fits = asked is kinds["IsNaN"].outputs[0] and constant(zero) == 0.0 and kept is value
    return where.outputs[0] if fits else None


def zeroes(node: ir.Node, value: ir.Value) -> tuple[ir.Value, bool] | None:
    """The mask by which a Where replaces elements of a value by zeros, and which of its values does; else None."""
    if not is_onnx(node, "Where"):
        return None
    mask, then, otherwise = node.inputs
    hides = otherwise is value
    fits = mask is not None and (hides or then is value) and constant(then if hides else otherwise) == 0.0
    return (mask, hides) if fits and mask is not None else None


def swaps_last(node: ir.Node) -> bool:
    """Whether a Transpose swaps the last two axes, and no others."""
    order = node.attributes.get_ints("perm", ())
    rank = len(order)
    return tuple(order) == (*range(rank - 2), rank - 1, rank - 2)


def computed_beside(passed: Sequence[ir.Value], ends: Sequence[ir.Value]) -> Iterator[ir.Value]:
    """The values that depend on scores or weights by other nodes than those that make `passed` values or `ends`.

    To read the sizes of `passed` values does not count: they are read off queries and keys.
    """
    own = {value.producer() for value in (*passed, *ends)}

    def below(value: ir.Value) -> list[ir.Value]:
        return [made for node, _ in value.uses() if node not in own for made in node.outputs]

    others = [made for value in passed for made in below(value) if not is_onnx(made.producer(), "Shape")]
    return reached(others, below)
