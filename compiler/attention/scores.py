"""Finds the scores of attention: the product of queries and keys, and what is done to it before a Softmax."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from splitc.compiler.attention.softmax import is_row_maximum, swaps_last
from splitc.compiler.graphs.matching import VIEWS, constant, input_orders
from splitc.compiler.patterns.errors import NO_SIZES, NotFusedError
from splitc.compiler.patterns.operand import PASSED, factor_of, same_number
from splitc.compiler.patterns.product import Product, RankOf, comes_from_product, is_product, multiplies, read_product

# The most nodes between the product of queries and keys and the Softmax. A choice: both inputs of an Add are searched
# for the product, so that the time may double with each Add.
DEEPEST = 16
# A number up to this, added to all scores, changes no weights and rounds no scores. TensorFlow's models add 1e-9, and
# torch.baddbmm is exported with zeros, filled to the shape of the scores. Only up to NO_SHIFT does it change nothing
# before a softcap or sinks either.
SHIFT, NO_SHIFT = 1.0, 1e-6
# Scores that a mask replaces by this or less get weight 0: exporters write -1e4 in float16, and less in other types.
HIDDEN = -1e4
SHIFTED = "a number is added to all its scores, or a row's maximum is subtracted from them, before"


@dataclass(frozen=True)
class Bias:
    """What is added to the scores: `factor` x `value`, broadcast. `at` are the scores after that.

    If `hides` is given, `value` is a boolean mask: scores where it equals `hides` become `low`.
    """

    value: ir.Value
    at: ir.Value
    factor: float = 1.0
    hides: bool | None = None
    low: float = 0.0


@dataclass(frozen=True)
class RowScale:
    """A computed `value` that scores are multiplied by, or divided by. `at` are the scores after this step."""

    value: ir.Value
    at: ir.Value
    divides: bool


@dataclass(frozen=True)
class Scores:
    """The product of queries and keys, and what is done to it before the Softmax. For the fields see Attention.

    `unjoined` are the scores before the sinks are concatenated. `shifted`: a row's scores are all larger or smaller by
    a number, which changes no weights unless a softcap or sinks follow.
    """

    product: Product
    passed: tuple[ir.Value, ...]
    biases: tuple[Bias, ...] = ()
    scale: float = 1.0
    row_scales: tuple[RowScale, ...] = ()
    softcap: float = 0.0
    sinks: ir.Value | None = None
    unjoined: ir.Value | None = None
    shifted: bool = False


def read_factors(node: ir.Node, rank_of: RankOf) -> Product | None:
    """As `read_product`. Raises NotFusedError if the rank of a factor is not known."""
    if any(value is None or rank_of(value) is None for value in node.inputs[:2]):
        raise NotFusedError(NO_SIZES)
    return read_product(node, rank_of)


def find_scores(value: ir.Value, deepest: int, rank_of: RankOf) -> Scores:
    """The product of queries and keys, at most `deepest` nodes above, that scores come from, and what is done to it."""
    node = value.producer()
    if node is not None and deepest and multiplies(node):
        return _read_scores(node, rank_of)
    if node is None or node.domain or not deepest:
        raise NotFusedError("its scores come from no product of queries and keys")
    one = node.inputs[0]
    assert one is not None
    if node.op_type in PASSED | VIEWS or _changes_nothing(node, one):
        above = find_scores(one, deepest - 1, rank_of)
        above = replace(above, shifted=above.shifted or node.op_type == "Sub")
    elif node.op_type in ("Mul", "Div"):
        above = _find_scaled(node, deepest, rank_of)
    elif node.op_type in ("Add", "Sub"):
        above = _find_biased(node, deepest, rank_of)
    elif node.op_type == "Where":
        above = _find_masked(node, deepest, rank_of)
    elif node.op_type == "Tanh":
        above = _find_capped(one, deepest, rank_of)
    elif node.op_type == "Concat":
        above = _find_joined(node, deepest, rank_of)
    elif node.op_type == "Transpose" and swaps_last(node):
        above = _find_turned(one, deepest, rank_of)
    else:
        raise NotFusedError(f"a {node.op_type} is between the product of its queries and keys and its Softmax")
    if above.sinks is not None and node.op_type not in PASSED | {"Concat"} and not _changes_nothing(node, one):
        raise NotFusedError("its attention sinks are changed after they are concatenated with the scores")
    return replace(above, passed=(*above.passed, value))


def _find_joined(node: ir.Node, deepest: int, rank_of: RankOf) -> Scores:
    """Scores that a Concat joins with attention sinks."""
    axis, rank = node.attributes.get_int("axis", -1), rank_of(node.outputs[0])
    if len(node.inputs) != 2 or rank is None or axis not in (-1, rank - 1):
        raise NotFusedError("its scores are concatenated with something other than attention sinks")
    scores, sinks = node.inputs
    assert scores is not None
    above = find_scores(scores, deepest - 1, rank_of)
    if above.sinks is not None:
        raise NotFusedError("its scores are concatenated with attention sinks twice")
    if above.shifted:
        raise NotFusedError(f"{SHIFTED} they are concatenated with attention sinks")
    return replace(above, sinks=sinks, unjoined=scores)


def _find_turned(value: ir.Value, deepest: int, rank_of: RankOf) -> Scores:
    """Scores whose rows are those of the keys until a Transpose, as Keras multiplies keys with queries."""
    above = find_scores(value, deepest - 1, rank_of)
    if above.biases or above.row_scales or above.sinks is not None or above.shifted:
        raise NotFusedError("its scores are transposed after they are changed")
    return replace(above, product=replace(above.product.flipped(), order=above.product.order))


def _changes_nothing(node: ir.Node, scores: ir.Value) -> bool:
    """Whether a node changes no attention weights: it subtracts the row's maximum, or clips hidden scores."""
    if node.op_type == "Sub":
        return is_row_maximum(node.inputs[1], scores)
    return node.op_type == "Max" and len(node.inputs) == 2 and (constant(node.inputs[1]) or 0.0) <= HIDDEN


def _read_scores(node: ir.Node, rank_of: RankOf) -> Scores:
    if not is_product(node):
        raise NotFusedError("its scores are a product with an initializer, not of queries and keys")
    product = read_factors(node, rank_of)
    if product is None:
        raise NotFusedError("the product of its queries and keys is along several axes, or their other axes differ")
    rank = len(product.order)
    if product.order[-2:] == (rank - 1, rank - 2):
        product = product.flipped()
    if product.order != tuple(range(rank)):
        raise NotFusedError("the axes of its scores are in an order that splitc does not know")
    return Scores(product, (node.outputs[0],), scale=product.scale)


def _find_scaled(node: ir.Node, deepest: int, rank_of: RankOf) -> Scores:
    scaled = factor_of(node)
    if scaled is None:
        return _find_scaled_rows(node, deepest, rank_of)
    above = find_scores(scaled[0], deepest - 1, rank_of)
    # (scores + bias) x factor = scores x factor + bias x factor. Masked scores must stay low enough.
    biases = tuple(replace(b, factor=b.factor * scaled[1], low=b.low * scaled[1]) for b in above.biases)
    if scaled[1] < 0 or any(bias.hides is not None and bias.low > HIDDEN / 10 for bias in biases):
        raise NotFusedError("its scores are scaled after the mask, so that masked scores may not be low enough")
    return replace(above, biases=biases, scale=above.scale * scaled[1], softcap=above.softcap * scaled[1])


def _find_scaled_rows(node: ir.Node, deepest: int, rank_of: RankOf) -> Scores:
    """Scores that are multiplied or divided by a computed value, such as one number for each head."""
    for path, value in input_orders(node):
        assert path is not None and value is not None
        if path.is_initializer() or not comes_from_product(path):
            continue
        above = find_scores(path, deepest - 1, rank_of)
        if above.biases or above.softcap:
            raise NotFusedError("its scores are scaled after a mask or a softcap (Tanh), and not by a constant")
        scale = RowScale(value, node.outputs[0], node.op_type == "Div")
        return replace(above, row_scales=(*above.row_scales, scale))
    raise NotFusedError("its scores come from no product of queries and keys")


def _find_capped(value: ir.Value, deepest: int, rank_of: RankOf) -> Scores:
    """Scores after a Tanh. Their softcap is 1; a Mul that follows multiplies it."""
    above = find_scores(value, deepest - 1, rank_of)
    if above.biases or above.softcap:
        raise NotFusedError("its softcap (Tanh) comes after a mask or another softcap")
    if above.shifted:
        raise NotFusedError(f"{SHIFTED} their softcap (Tanh)")
    return replace(above, softcap=1.0)


def _find_biased(node: ir.Node, deepest: int, rank_of: RankOf) -> Scores:
    """Scores to which something is added, or from which something is subtracted."""
    reasons = []
    for path, bias in input_orders(node):
        assert path is not None and bias is not None
        try:
            above = find_scores(path, deepest - 1, rank_of)
        except NotFusedError as error:
            reasons.append(error)
        else:
            number = same_number(bias)
            if number is not None and abs(number) <= SHIFT:
                return replace(above, shifted=above.shifted or abs(number) > NO_SHIFT)
            added = Bias(bias, node.outputs[0], -1.0 if node.op_type == "Sub" else 1.0)
            return replace(above, biases=(*above.biases, added))
    # The reason of the input that does lead to a product says more.
    raise next((reason for reason in reasons if "no product" not in str(reason)), reasons[0])


def _find_masked(node: ir.Node, deepest: int, rank_of: RankOf) -> Scores:
    """Scores that a Where replaces by a low number wherever a mask says so."""
    mask, then, otherwise = node.inputs
    assert mask is not None and then is not None and otherwise is not None
    hides = constant(then) is not None
    low, path = (constant(then), otherwise) if hides else (constant(otherwise), then)
    if low is None:
        raise NotFusedError("a Where replaces some of its scores by something other than one constant")
    if low > HIDDEN:
        raise NotFusedError(f"a Where replaces some of its scores by {low:g}, which is too high for a mask")
    above = find_scores(path, deepest - 1, rank_of)
    return replace(above, biases=(*above.biases, Bias(mask, node.outputs[0], 1.0, hides, low)))
