"""Adds an attention's biases and masks up to one bias [batch or 1, heads or 1, length, all], as operators take it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from splitc.compiler.attention.attention import Attention
from splitc.compiler.attention.frame import Frame
from splitc.compiler.attention.scores import Bias
from splitc.compiler.patterns.errors import NotFusedError
from splitc.compiler.patterns.sizes import ONE, Axis, Sizes, fixed_axis, is_one
from splitc.compiler.patterns.writing import Writer

# The lowest numbers of types: a float32 mask may have lower ones, which would be cast to -inf.
LOWEST = {ir.DataType.FLOAT16: -65504.0, ir.DataType.BFLOAT16: -3.3895314e38}
# What a boolean mask adds to hidden scores: low enough for weight 0, and sums of several masks stay finite. Float16 has
# no lower number than -65504.
LOW, LOW_FLOAT16 = -1e30, -3e4


def check_bias(bias: Bias, sizes: Sizes) -> None:
    """Raise NotFusedError if a bias can't be broadcast to the scores, or is the same for all keys."""
    own, scores = (sizes.known(value, "its mask or bias") for value in (bias.value, bias.at))
    for one, other in zip(reversed(own), reversed(scores), strict=False):
        if one.size not in (ONE, other.size):
            raise NotFusedError("the shape of its mask or bias does not fit its scores")
    if (own[-1].size if own else ONE) != scores[-1].size:
        raise NotFusedError("its mask or bias is the same for all keys")


def write_bias(attention: Attention, frame: Frame, work: Writer) -> ir.Value:
    """The sum of all biases and masks, [batch or 1, heads or 1, length, all], in the queries' type."""
    first, *others = (_write_one(bias, frame, work, f"bias{n}") for n, bias in enumerate(attention.biases))
    total = first
    for number, other in enumerate(others):
        if other.dtype != total.dtype:
            wide = total if total.dtype == ir.DataType.FLOAT else other
            total, other = _as_type(total, wide, work), _as_type(other, wide, work)
        both = [a if a.size != ONE else b for a, b in zip(work.axes(total), work.axes(other), strict=True)]
        total = work.add(f"biases{number}", "Add", [total, other], total, both)
    total = _as_type(total, attention.query.value, work)
    axes = work.axes(total)
    return work.expand(total, [*axes[:2], frame.length, axes[3]], "bias_rows")


def _write_one(bias: Bias, frame: Frame, work: Writer, role: str) -> ir.Value:
    """One bias or mask as [batch or 1, heads or 1, length or 1, all]."""
    value = bias.value
    if bias.hides is not None:
        value = _write_mask(bias, work, role)
    elif bias.factor != 1:
        factor = work.editor.scalar(bias.factor, value)
        value = work.add(f"{role}_scaled", "Mul", [value, factor], value, work.axes(value))
    scores = work.axes(bias.at)
    lacking = len(scores) - len(work.axes(value))
    if lacking:  # Unsqueeze takes its axes in another way before opset 13
        ones = work.editor.constant(np.ones(len(scores), np.int64))
        padded = [*[fixed_axis(1)] * lacking, *work.axes(value)]
        value = work.add(f"{role}_axes", "Expand", [value, ones], value, padded)
    leading = scores[:-2]
    batch = frame.divided(leading)
    parts = [(0, len(leading), frame.batch), (0, len(leading), frame.heads)]
    if batch is not None:
        parts = [(0, batch, frame.batch), (batch, len(leading), frame.heads)]
    own = list(work.axes(value))
    for start, end, _ in parts:
        if _is_mixed(own[start:end], leading[start:end]):
            own[start:end] = leading[start:end]
    value = work.expand(value, own, f"{role}_repeated")
    # A single leading axis may hold the batch and the heads merged.
    merged = [
        own[start] if end - start == 1 < len(leading) else fixed_axis(1) if is_one(own[start:end]) else part
        for start, end, part in parts
    ]
    return work.reshape(value, [*merged, *own[-2:]], f"{role}_four")


def _write_mask(bias: Bias, work: Writer, role: str) -> ir.Value:
    """A boolean mask as a bias: 0 for visible scores, a low number for hidden ones."""
    low = bias.low if math.isinf(bias.low) else LOW_FLOAT16 if bias.at.dtype == ir.DataType.FLOAT16 else LOW
    numbers = [work.editor.scalar(number, bias.at) for number in (low, 0.0)]
    hidden = numbers if bias.hides else numbers[::-1]
    return work.add(f"{role}_mask", "Where", [bias.value, *hidden], bias.at, work.axes(bias.value))


def _is_mixed(own: Sequence[Axis], full: Sequence[Axis]) -> bool:
    """Whether some of a bias's axes are broadcast to those of the scores, and others are not."""
    ones = [axis.size == ONE for axis, other in zip(own, full, strict=True) if other.size != ONE]
    return any(ones) and not all(ones)


def _as_type(value: ir.Value, like: ir.Value, work: Writer) -> ir.Value:
    """A bias cast to the type of another value, without getting infinite."""
    if value.dtype == like.dtype:
        return value
    if like.dtype in LOWEST:
        lowest = work.editor.scalar(LOWEST[like.dtype], value)
        value = work.add("bias_bounded", "Max", [value, lowest], value, work.axes(value))
    return work.cast(value, like, "bias_cast")
