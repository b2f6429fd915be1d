"""Reads attention that is one operator as an `Attention`, so that it can be replaced.

Newer exporters write ONNX's Attention, and optimizers of exported models ONNX Runtime's MultiHeadAttention. Kernels of
both copy the caches in each request to append to them. See Attention in ONNX's Operators.md, and
com.microsoft.MultiHeadAttention in ONNX Runtime's ContribOperators.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.attention.attention import Attention
from splitc.compiler.attention.scores import Bias
from splitc.compiler.graphs.matching import VIEWS, source_through
from splitc.compiler.nodes import input_at, known_tensor, operator_name
from splitc.compiler.patterns.errors import NO_SIZES, NotFusedError
from splitc.compiler.patterns.operand import SWAP_HEADS, Operand, as_operand, axes_of
from splitc.compiler.patterns.sizes import Axis, fixed_axis
from splitc.compiler.patterns.writing import Writer

OPERATOR, MULTI_HEAD = "Attention", "com.microsoft.MultiHeadAttention"
# Indices of outputs.
KEYS, VALUES, SCORES = 1, 2, 3
# Inputs of MultiHeadAttention that are not understood.
OTHERS = {3: "bias", 4: "key_padding_mask", 8: "past_sequence_length", 9: "cache_indirection"}


@dataclass(frozen=True)
class _Form:
    """Where an operator has its mask, its pasts and its attributes, and `others` of its inputs that are not understood.

    `guards`: rows whose keys are all hidden give zeros.
    """

    mask: int
    pasts: tuple[int, int]
    others: Mapping[int, str]
    heads: tuple[str, str]
    causal: str
    guards: bool


FORMS = {
    OPERATOR: _Form(3, (4, 5), {6: "nonpad_kv_seqlen"}, ("q_num_heads", "kv_num_heads"), "is_causal", True),
    MULTI_HEAD: _Form(5, (6, 7), OTHERS, ("num_heads", "num_heads"), "unidirectional", False),
}
# A larger constant mask is not read from the model's file. A choice.
LARGEST = 1 << 22
NO_HEADS = "the number or the size of its heads is dynamic"


def is_operator(node: ir.Node) -> bool:
    """Whether a node is attention as one operator that may be replaced."""
    return operator_name(node) in FORMS


def read_operator(node: ir.Node, work: Writer) -> Attention:
    """What the operator computes. Raises NotFusedError for a form that no other operator computes.

    The scores are no value of the graph, so a placeholder has their sizes. Rows whose keys are all hidden give zeros.
    """
    form = FORMS[operator_name(node)]
    _check(node, form)
    query, keys, values = (_by_heads(node, place, form, work) for place in range(3))
    mask = input_at(node, form.mask)
    mask = None if mask is None or _hides_nothing(mask) else mask
    has_past = input_at(node, form.pasts[0]) is not None
    if has_past:
        keys, values = as_operand(node.outputs[KEYS], 4), as_operand(node.outputs[VALUES], 4)
    axes, all_axes = axes_of(query, work.sizes), axes_of(keys, work.sizes)
    size, is_causal = axes[3].fixed, bool(node.attributes.get_int(form.causal, 0))
    if size is None:
        raise NotFusedError(NO_HEADS)
    if is_causal and not has_past and not axes[2].is_same(all_axes[2]):
        raise NotFusedError("it is causal without a cache, and has more or fewer queries than keys")
    scores = ir.Value()
    work.name_value(scores, "scores", query.value, (*axes[:3], all_axes[2]))
    hides = None if mask is None or mask.dtype != ir.DataType.BOOL else False
    return Attention(
        query=query,
        keys=keys.swapped(),
        values=values,
        biases=() if mask is None else (Bias(mask, scores, hides=hides, low=-math.inf),),
        scale=node.attributes.get_float("scale", 0.0) or size**-0.5,
        row_scales=(),
        guarded=form.guards and mask is not None,
        output=node.outputs[0],
        order=(0, 1, 2, 3),
        layouts=(scores, scores),
        passed=(),
        groups=_groups(axes[1], all_axes[1]),
        is_causal=is_causal,
        softcap=node.attributes.get_float("softcap", 0.0),
        is_flat=not query.is_value,
    )


def _check(node: ir.Node, form: _Form) -> None:
    """Raise NotFusedError for a form that no other operator computes."""
    for place, name in form.others.items():
        if input_at(node, place) is not None:
            raise NotFusedError(f"it has the input {name}")
    if len(node.outputs) > SCORES and (node.outputs[SCORES].uses() or node.outputs[SCORES].is_graph_output()):
        raise NotFusedError("its output qk_matmul_output has readers")
    precision = node.attributes.get_int("softmax_precision", ir.DataType.FLOAT)
    if precision not in (ir.DataType.FLOAT, node.inputs[0].dtype if node.inputs[0] else None):
        raise NotFusedError("its softmax_precision is neither float32 nor the type of its queries")
    pasts = [input_at(node, place) is not None for place in form.pasts]
    if any(pasts) and not (all(pasts) and len(node.outputs) > VALUES):
        raise NotFusedError("its keys and its values do not have a cache each")


def _by_heads(node: ir.Node, place: int, form: _Form, work: Writer) -> Operand:
    """Queries, keys or values as [batch, heads, rows, size]."""
    value = input_at(node, place)
    axes = None if value is None else work.sizes.axes(value)
    if value is None or axes is None:
        raise NotFusedError(NO_SIZES)
    if len(axes) == 4:
        return as_operand(value, 4)
    if len(axes) != 3:
        raise NotFusedError("its queries, keys or values are packed into one tensor")
    heads, width = node.attributes.get_int(form.heads[bool(place)], 0), axes[2].fixed
    if not heads or width is None:
        raise NotFusedError(NO_HEADS)
    by_rows = [*axes[:2], fixed_axis(heads), fixed_axis(width // heads)]
    return Operand(work.reshape(value, by_rows, f"input{place}_by_rows"), SWAP_HEADS)


def _hides_nothing(mask: ir.Value) -> bool:
    """Whether a mask is a constant of True only: exporters write one for encoders without a mask."""
    mask = source_through(mask, "Expand", "Identity", *VIEWS)
    tensor = None if mask.producer() is not None else known_tensor(mask)
    if tensor is None or tensor.dtype != ir.DataType.BOOL or tensor.size > LARGEST:
        return False
    return bool(tensor.numpy().all())


def _groups(heads: Axis, of_keys: Axis) -> int:
    """The number of query heads that share a key head."""
    if heads.fixed is None or not of_keys.fixed or heads.fixed % of_keys.fixed:
        raise NotFusedError(NO_HEADS)
    return heads.fixed // of_keys.fixed
