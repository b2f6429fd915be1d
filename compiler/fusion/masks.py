"""Masks that requests may leave out: biases that only attention reads, the same for all heads.

On GPUs, attention with a cache is slower with a bias: ONNX Runtime then has no kernel that reads only the filled rows,
and repeats keys and values for each group of heads, over the whole room. In most requests the mask hides nothing but
later tokens, which causal attention hides by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import onnx_ir as ir

from splitc.compiler.frontend.matching import is_onnx
from splitc.compiler.fusion.cache import ROWS
from splitc.compiler.fusion.grouped import OPERATOR
from splitc.compiler.fusion.lengths import Filled
from splitc.compiler.fusion.multi_head import DOMAIN
from splitc.compiler.fusion.operand import constant
from splitc.compiler.fusion.sizes import Sizes
from splitc.compiler.fusion.softmax import without_nan

# The places of the operator's inputs: the keys of the past, and what is added to the scores.
PAST, BIAS = 3, 10
# The place of what a Where keeps where its condition does not hold.
KEPT = 2


def find_masks(made: Iterable[ir.Value], filled: Sequence[Filled], sizes: Sizes) -> dict[str, str]:
    """The masks among a preamble's outputs, each with the length input of the caches that its attentions read."""
    masks: dict[str, str] = {}
    for value in made:
        axes, readers = sizes.axes(value), list(biased(value))
        is_shared = axes is not None and len(axes) == 4 and axes[1].fixed == 1
        pasts = {None if node is None else _length(node, filled, sizes) for node in readers}
        if is_shared and len(pasts) == 1 and (length := pasts.pop()) is not None:
            masks[value.name or ""] = length
    return masks


def find_blanks(made: Iterable[ir.Value], masks: Collection[str]) -> list[str]:
    """The preamble's outputs that only say which rows are blank behind attentions with one of the masks."""
    return [
        value.name or ""
        for value in made
        if value.uses() and all(_blanks(use.node, value, masks) for use in value.uses())
    ]


def _blanks(node: ir.Node, rows: ir.Value, masks: Collection[str]) -> bool:
    """Whether a node sets these rows of an attention's result to zero."""
    if not is_onnx(node, "Where") or node.inputs[0] is not rows or constant(node.inputs[1]) != 0.0:
        return False
    kept = node.inputs[KEPT]
    above = None if kept is None else kept.producer()
    if is_onnx(above, "Where"):  # zeros for its NaN
        kept = above.inputs[KEPT]
        above = above if kept is None or without_nan(kept) is not above.outputs[0] else kept.producer()
    if above is None or (above.op_type, above.domain) != (OPERATOR, DOMAIN) or len(above.inputs) <= BIAS:
        return False
    bias = above.inputs[BIAS]
    return bias is not None and bias.name in masks


def biased(value: ir.Value) -> Iterator[ir.Node | None]:
    """The attentions that add a value to their scores and are not causal themselves; None for each other reader."""
    for node, place in value.uses():
        is_bias = (node.op_type, node.domain, place) == (OPERATOR, DOMAIN, BIAS)
        yield node if is_bias and not node.attributes.get_int("causal", 1) else None


def _length(node: ir.Node, filled: Sequence[Filled], sizes: Sizes) -> str | None:
    """The input for the length of an attention's caches."""
    past = node.inputs[PAST]
    axes = None if past is None else sizes.axes(past)
    return next((one.input.name for one in filled if axes and axes[ROWS].size == one.past.size), None)
