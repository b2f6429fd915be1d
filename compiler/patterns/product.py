"""Reads matrix products of two computed values: MatMul, Einsum, and ONNX Runtime's FusedMatMul."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import onnx_ir as ir

from splitc.compiler.graphs.matching import readers_of
from splitc.compiler.graphs.walks import levels, producers
from splitc.compiler.nodes import operator_name
from splitc.compiler.operators.linear import einsum_labels
from splitc.compiler.patterns.operand import ADDED, Operand, as_operand

PRODUCTS = frozenset({"MatMul", "Einsum", "com.microsoft.FusedMatMul"})
# Returns the number of a value's axes; None if it is not known.
RankOf = Callable[[ir.Value], int | None]


@dataclass(frozen=True)
class Product:
    """`first` [..., rows, inner] times `second` [..., inner, columns] times `scale`.

    Axis n of its output is axis `order[n]` of [..., rows, columns].
    """

    first: Operand
    second: Operand
    order: tuple[int, ...]
    scale: float = 1.0

    def flipped(self) -> Product:
        """The same product as transposed `second` x transposed `first`."""
        rank = len(self.order)
        swap = {rank - 2: rank - 1, rank - 1: rank - 2}
        order = tuple(swap.get(axis, axis) for axis in self.order)
        return Product(self.second.swapped(), self.first.swapped(), order, self.scale)


def multiplies(node: ir.Node) -> bool:
    """Whether a node is a matrix product of any two values."""
    return operator_name(node) in PRODUCTS


def is_product(node: ir.Node) -> bool:
    """Whether a node is a matrix product of two computed values."""
    return (
        multiplies(node)
        and len(node.inputs) == 2
        and all(factor is not None and not factor.is_initializer() for factor in node.inputs)
    )


def weighs(value: ir.Value) -> bool:
    """Whether a Softmax's output is multiplied with a computed value within a few nodes."""

    def below(one: ir.Value) -> list[ir.Value]:
        ends = ("TopK", "ReduceSum", "ArgMax", "Gather")
        return [node.outputs[0] for node in readers_of(one) if not node.domain and node.op_type not in ends]

    near = chain.from_iterable(islice(levels([value], below), 6))
    return any(is_product(node) for one in near for node in readers_of(one))


def comes_from_product(value: ir.Value) -> bool:
    """Whether a Softmax's input comes from a product of two computed values within a few nodes."""

    def above(one: ir.Value) -> list[ir.Value]:
        node = one.producer()
        ends = node is None or node.domain or node.op_type in ("MatMul", "Gemm", "Conv")
        return [] if node is None or ends else [source for source in node.inputs[:2] if source is not None]

    return any(is_product(node) for level in islice(levels([value], above), 10) for node in producers(level))


def read_product(node: ir.Node, rank_of: RankOf) -> Product | None:
    """A product's factors; None if they are not contracted along exactly one axis, or a MatMul's differ in rank."""
    first, second = node.inputs
    assert first is not None and second is not None
    ranks = rank_of(first), rank_of(second)
    if ranks[0] is None or ranks[1] is None or min(ranks[0], ranks[1]) < 2:
        return None
    if node.op_type == "Einsum":
        return _read_einsum(node.attributes.get_string("equation", ""), (first, ranks[0]), (second, ranks[1]))
    if ranks[0] != ranks[1]:
        return None
    if node.op_type == "MatMul":
        return Product(as_operand(first, ranks[0]), as_operand(second, ranks[0]), tuple(range(ranks[0])))
    return _read_fused(node, as_operand(first, ranks[0]), as_operand(second, ranks[0]))


def _read_fused(node: ir.Node, first: Operand, second: Operand) -> Product | None:
    """A FusedMatMul, whose attributes transpose the factors and scale the result."""
    if any(node.attributes.get_int(f"transBatch{side}", 0) for side in "AB"):
        return None
    sides = [
        operand.swapped() if node.attributes.get_int(f"trans{side}", 0) else operand
        for side, operand in zip("AB", (first, second), strict=True)
    ]
    order = tuple(range(len(first.axes)))
    return Product(sides[0], sides[1], order, node.attributes.get_float("alpha", 1.0))


def _read_einsum(equation: str, first: tuple[ir.Value, int], second: tuple[ir.Value, int]) -> Product | None:
    """An Einsum of two values, given with their ranks. One may lack axes of the other, as keys for all heads."""
    terms, arrow, made_of = equation.replace(" ", "").partition("->")
    one, other = (einsum_labels(term, rank) for term, (_, rank) in zip(terms.split(","), (first, second), strict=True))
    rank = len({*one, *other}) - 1
    result = einsum_labels(made_of, rank)
    if not arrow or any(len({*term}) < len(term) for term in (one, other, result)) or len(result) != rank:
        return None
    inner = {*one} & {*other} - {*result}
    if len(inner) != 1 or {*one, *other} != {*result} | inner:
        return None
    (along,) = inner
    row, column = _row(one, other, result, along), _row(other, one, result, along)
    if row is None or column is None:
        return None
    made = [*(label for label in result if label not in (row, column)), row, column]

    def operand(value: ir.Value, term: Sequence[str], last: list[str]) -> Operand:
        labels = [*made[:-2], *last]
        return Operand(value, tuple(term.index(label) if label in term else ADDED for label in labels))

    order = tuple(made.index(label) for label in result)
    return Product(operand(first[0], one, [row, along]), operand(second[0], other, [along, column]), order)


def _row(term: Sequence[str], other: Sequence[str], result: Sequence[str], inner: str) -> str | None:
    """The label of a term's rows: of those that only it has, one of the last two of the scores.

    If only this term ends with the `inner` label, it is those scores.
    """
    own = [label for label in term if label not in other]
    near = term[-2:] if term[-1] == inner != other[-1] else result[-2:]
    likely = own if len(own) == 1 else [label for label in own if label in near]
    return likely[0] if len(likely) == 1 else None
