"""Finds attention that an exporter decomposed into matrix products and a Softmax, by its structure alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from splitc.compiler.attention.scores import DEEPEST, Bias, RowScale, Scores, find_scores, read_factors
from splitc.compiler.attention.softmax import (
    Softmax,
    computed_beside,
    leaves_out_last,
    swaps_last,
    without_nan,
    zeroes,
)
from splitc.compiler.graphs.matching import VIEWS, readers_of
from splitc.compiler.patterns.errors import NotFusedError
from splitc.compiler.patterns.operand import PASSED, Operand, in_half_precision
from splitc.compiler.patterns.product import (
    Product,
    RankOf,
    comes_from_product,
    is_product,
    multiplies,
    weighs,
)


@dataclass(frozen=True)
class Blanks:
    """Entirely masked rows: where `rows` [batch or 1, 1, length, 1] is true, `result` has zeros.

    If `hides` is given, `rows` is instead the mask [..., all], which equals it where scores are hidden.
    """

    rows: ir.Value
    result: ir.Value
    hides: bool | None = None


@dataclass(frozen=True)
class Attention:
    """softmax(scale x query x keys + biases) x values.

    Queries are [..., length, size], keys [..., size, all] and values [..., all, size]: `length` new tokens attend to
    `all` tokens.

    - `row_scales`: computed factors of the scores, beside the constant `scale`.
    - `guarded`: NaN, in rows that the mask hides entirely, is replaced by zeros.
    - `order`: axis n of the `output` is axis `order[n]` of [..., length, size].
    - `layouts`: the forms of the scores on their way, which may split their leading axes differently from the queries.
    - `passed`: all values between the queries and the output, which no longer exist after fusion.
    - `groups`: the number of consecutive query heads that share a head of keys and of values.
    - `is_causal`: tokens do not attend to later ones.
    - `softcap`: the bound of scores: softcap x tanh(scores / softcap) before any bias is added; 0 for none.
    - `is_flat`: the output is [batch, length, heads x size], whatever the `order`.
    - `sinks`: attention sinks [..., length, 1], concatenated to the scores; their weights are dropped.
    """

    query: Operand
    keys: Operand
    values: Operand
    biases: tuple[Bias, ...]
    scale: float
    row_scales: tuple[RowScale, ...]
    guarded: bool
    output: ir.Value
    order: tuple[int, ...]
    layouts: tuple[ir.Value, ...]
    passed: tuple[ir.Value, ...]
    groups: int = 1
    is_causal: bool = False
    softcap: float = 0.0
    is_flat: bool = False
    sinks: ir.Value | None = None
    blanks: Blanks | None = None

    @property
    def result(self) -> ir.Value:
        """The output after entirely masked rows are set to zero; the output itself if they are not."""
        return self.output if self.blanks is None else self.blanks.result


@dataclass(frozen=True)
class _Weighing:
    """The product of a Softmax's output (the attention weights) with values [..., all, size].

    - `cut`: the last weight of each row, that of a sink, is dropped.
    - `zeroed`: a mask by which weights become zero, and which of its values does so; None without one.

    For other fields see Attention.
    """

    values: Operand
    weights: ir.Value
    output: ir.Value
    order: tuple[int, ...]
    guarded: bool = False
    passed: tuple[ir.Value, ...] = ()
    cut: bool = False
    zeroed: tuple[ir.Value, bool] | None = None


def find_attentions(softmax: Softmax, rank_of: RankOf) -> list[Attention]:
    """The attentions around a Softmax: one for each product of its output with values.

    There is none in a router or a classifier. There are several if different values get the same weights,
    as in differential attention. Raises NotFusedError for attention of an unknown form.
    """
    try:
        weighings = _find_weighings(softmax.output, rank_of)
        if not softmax.is_last:
            raise NotFusedError("its Softmax may not be along the last axis")
        above = find_scores(softmax.scores, DEEPEST, rank_of)
    except NotFusedError:
        if not weighs(softmax.output) or not comes_from_product(softmax.scores):
            return []
        raise
    return [_joined(softmax, above, below) for below in weighings]


def _joined(softmax: Softmax, above: Scores, below: _Weighing) -> Attention:
    """The attention of these scores and this product with values."""
    if below.cut != (above.sinks is not None):
        raise NotFusedError("its attention sinks are not both joined before its Softmax and cut off after it")
    if below.zeroed is not None and all((bias.value, bias.hides) != below.zeroed for bias in above.biases):
        raise NotFusedError("its attention weights become zero by another mask than its scores have")
    layouts = (above.unjoined or softmax.scores, below.weights, *(bias.at for bias in above.biases))
    passed = (*above.passed, softmax.output, *below.passed)
    query, keys, values = _factors(above.product, below.values)
    _check_apart([*above.passed, softmax.output, *below.passed], below.output, above)
    return Attention(
        query=query,
        keys=keys,
        values=values,
        biases=above.biases,
        scale=above.scale,
        row_scales=above.row_scales,
        guarded=below.guarded,
        output=below.output,
        order=below.order,
        layouts=layouts,
        passed=passed,
        softcap=above.softcap,
        sinks=above.sinks,
        blanks=None if below.zeroed is None else Blanks(below.zeroed[0], below.output, below.zeroed[1]),
    )


def _check_apart(passed: Sequence[ir.Value], output: ir.Value, above: Scores) -> None:
    """Raise NotFusedError if what is added to scores, or multiplies them, is computed from them: they will be gone."""
    added = (*(bias.value for bias in above.biases), *(scale.value for scale in above.row_scales), above.sinks)
    if any(value in added for value in (*passed, *computed_beside(passed, [output]))):
        raise NotFusedError("its mask, or what multiplies its scores, is computed from them")


def _factors(product: Product, values: Operand) -> tuple[Operand, Operand, Operand]:
    """Queries, keys and values; in half precision, before casts to float32, if all of them are cast.

    The operator computes in float32 anyway.
    """
    query, keys = (in_half_precision(factor, scaled=True) for factor in (product.first, product.second))
    weighed = in_half_precision(values)
    if query is None or keys is None or weighed is None:
        return product.first, product.second, values
    is_one_type = query.value.dtype == keys.value.dtype == weighed.value.dtype
    return (query, keys, weighed) if is_one_type else (product.first, product.second, values)


def _find_weighings(value: ir.Value, rank_of: RankOf) -> list[_Weighing]:
    """The products of a Softmax's output with values, and the nodes in between.

    Raises NotFusedError if other nodes read the weights, or change them in an unknown way.
    """
    guarded, transposed, cut, straight, zeroed_by = False, False, False, value, None
    passed: list[ir.Value] = []
    while True:
        straight = straight if transposed else value
        users = readers_of(value)
        if (zeroed := without_nan(value)) is not None:
            guarded, value = True, zeroed
        elif value.is_graph_output() or (len(users) > 1 and not all(map(multiplies, users))):
            raise NotFusedError("its attention weights have other readers")
        elif users and multiplies(users[0]):
            passes, products = tuple(passed), [_read_weighing(user, value, transposed, rank_of) for user in users]
            return [
                replace(product, weights=straight, guarded=guarded, passed=passes, cut=cut, zeroed=zeroed_by)
                for product in products
            ]
        elif not users or users[0].domain:
            raise NotFusedError("no standard ONNX operator reads its attention weights")
        elif users[0].op_type in (PASSED if transposed else PASSED | VIEWS) and users[0].inputs[0] is value:
            value = users[0].outputs[0]
        elif users[0].op_type == "Transpose" and swaps_last(users[0]):
            transposed, value = not transposed, users[0].outputs[0]
        elif not transposed and not cut and leaves_out_last(users[0], rank_of):
            cut, value = True, users[0].outputs[0]
        elif not transposed and zeroed_by is None and (mask := zeroes(users[0], value)) is not None:
            zeroed_by, value = mask, users[0].outputs[0]
        else:
            raise NotFusedError(f"a {users[0].op_type} is between its Softmax and the product with the values")
        passed.append(value)


def _read_weighing(node: ir.Node, weights: ir.Value, transposed: bool, rank_of: RankOf) -> _Weighing:
    product = read_factors(node, rank_of) if is_product(node) else None
    if product is None:
        raise NotFusedError("its attention weights are not multiplied with computed values along one axis")
    if product.first.value is not weights:
        product = product.flipped()
    first = product.first.swapped() if transposed else product.first
    if not first.is_value:
        raise NotFusedError("its product with the values is along another axis than its Softmax")
    if product.scale != 1:
        raise NotFusedError("its product with the values is also scaled (alpha)")
    return _Weighing(product.second, weights, node.outputs[0], product.order)
