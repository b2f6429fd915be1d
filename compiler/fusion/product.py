"""Products of two computed values, whichever operator makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.fusion.operand import Operand, whole

PRODUCTS = frozenset({"MatMul", "Einsum"})
# The number of a value's axes, None if it is not known.
RankOf = Callable[[ir.Value], int | None]


@dataclass(frozen=True)
class Product:
    """`first` [..., rows, inner] times `second` [..., inner, columns].

    Axis n of its output is axis `order[n]` of [..., rows, columns].
    """

    first: Operand
    second: Operand
    order: tuple[int, ...]

    def flipped(self) -> Product:
        """The same output as `second` transposed times `first` transposed."""
        rank = len(self.order)
        swap = {rank - 2: rank - 1, rank - 1: rank - 2}
        return Product(self.second.swapped(), self.first.swapped(), tuple(swap.get(axis, axis) for axis in self.order))


def is_product(node: ir.Node) -> bool:
    """Whether a node is a product of two values that are both computed."""
    return (
        node.op_type in PRODUCTS
        and not node.domain
        and len(node.inputs) == 2
        and all(factor is not None and not factor.is_initializer() for factor in node.inputs)
    )


def read_product(node: ir.Node, rank_of: RankOf) -> Product | None:
    """A product's factors; None if it is no such product along one axis of each."""
    first, second = node.inputs
    assert first is not None and second is not None
    ranks = rank_of(first), rank_of(second)
    if ranks[0] is None or ranks[0] != ranks[1] or ranks[0] < 2:
        return None
    if node.op_type == "MatMul":
        return Product(whole(first, ranks[0]), whole(second, ranks[0]), tuple(range(ranks[0])))
    return _read_einsum(node.attributes.get_string("equation", ""), first, second, ranks[0])


def _read_einsum(equation: str, first: ir.Value, second: ir.Value, rank: int) -> Product | None:
    terms, arrow, result = equation.replace(" ", "").partition("->")
    one, _, other = terms.partition(",")
    if not arrow or any(len(set(term)) != len(term) or len(term) != rank for term in (one, other, result)):
        return None
    leading = [label for label in result if label in one and label in other]
    rows, columns, inner = set(result) - set(other), set(result) - set(one), (set(one) & set(other)) - set(result)
    if not len(rows) == len(columns) == len(inner) == 1 or len(leading) != rank - 2 or not rows <= set(one):
        return None
    (row,), (column,), (along,) = rows, columns, inner
    if column not in other:
        return None
    made = [*leading, row, column]
    return Product(
        Operand(first, tuple(one.index(label) for label in (*leading, row, along))),
        Operand(second, tuple(other.index(label) for label in (*leading, along, column))),
        tuple(made.index(label) for label in result),
    )
