"""Finds masks that requests may omit: biases [batch, 1, length, all] that only attention reads.

On GPUs, attention with a cache is slower with a bias: ONNX Runtime then has no kernel that reads only the filled rows,
and copies keys and values for each query head, over the whole capacity. In most requests the mask hides only later
tokens, which causal attention does without a mask.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import onnx_ir as ir

from splitc.compiler.attention.softmax import without_nan
from splitc.compiler.caches.cache import ROWS
from splitc.compiler.caches.grouped import BIAS, PASTS
from splitc.compiler.caches.lengths import Filled
from splitc.compiler.graphs.matching import constant, is_onnx
from splitc.compiler.nodes import operator_name
from splitc.compiler.operators.gpu_kernels import GROUPED, LATENT
from splitc.compiler.patterns.sizes import Sizes

# Attention with caches in place: the indices of its inputs are those of GroupQueryAttention.
CACHED = (GROUPED, LATENT)
# The index of a Where's input for elements whose condition is false.
KEPT = 2


def find_masks(made: Iterable[ir.Value], filled: Sequence[Filled], sizes: Sizes) -> dict[str, str]:
    """The masks among a preamble's outputs, by name, each with the input for the length of its attentions' caches."""
    masks: dict[str, str] = {}
    for value in made:
        axes, readers = sizes.axes(value), list(biased(value))
        is_shared = axes is not None and len(axes) == 4 and axes[1].fixed == 1
        pasts = {None if node is None else _length(node, filled, sizes) for node in readers}
        if is_shared and len(pasts) == 1 and (length := pasts.pop()) is not None:
            masks[value.name or ""] = length
    return masks


def find_blanks(made: Iterable[ir.Value], masks: Collection[str]) -> list[str]:
    """The preamble's outputs that are only read to set entirely masked rows of attention with these masks to zero."""
    return [
        value.name or ""
        for value in made
        if value.uses() and all(_blanks(use.node, value, masks) for use in value.uses())
    ]


def _blanks(node: ir.Node, rows: ir.Value, masks: Collection[str]) -> bool:
    """Whether a node sets these rows of such an attention's result to zero."""
    if not is_onnx(node, "Where") or node.inputs[0] is not rows or constant(node.inputs[1]) != 0.0:
        return False
    kept = node.inputs[KEPT]
    above = None if kept is None else kept.producer()
    if is_onnx(above, "Where"):  # it replaces NaN by zeros
        kept = above.inputs[KEPT]
        above = above if kept is None or without_nan(kept) is not above.outputs[0] else kept.producer()
    if above is None or operator_name(above) not in CACHED or len(above.inputs) <= BIAS:
        return False
    bias = above.inputs[BIAS]
    return bias is not None and bias.name in masks


def biased(value: ir.Value) -> Iterator[ir.Node | None]:
    """The attentions with caches, not causal, whose bias is a value; None for each other reader of the value."""
    for node, place in value.uses():
        is_bias = operator_name(node) in CACHED and place == BIAS
        yield node if is_bias and not node.attributes.get_int("causal", 1) else None


def _length(node: ir.Node, filled: Sequence[Filled], sizes: Sizes) -> str | None:
    """The input for the length of an attention's caches."""
    past = node.inputs[PASTS[0]]
    axes = None if past is None else sizes.axes(past)
    return next((one.input.name for one in filled if axes and axes[ROWS].size == one.past.size), None)
