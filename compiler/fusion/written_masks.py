"""Masks that are written as products, without a Where."""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.frontend.matching import made_by, value_before
from splitc.compiler.fusion.operand import factor_of

# Scores that a mask replaces by this or less get weight 0: exporters write -1e4 in float16, and less in other types.
HIDDEN = -1e4


def kept_by(path: ir.Value, bias: ir.Value) -> ir.Value | None:
    """The scores in mask x scores + low x (not mask), which computes the same as a Where; None for any other sum."""
    kept, hidden = made_by(path, "Mul"), factor_of(made_by(bias, "Mul"))
    if kept is None or hidden is None or hidden[1] > HIDDEN:
        return None
    negation = made_by(_cast_of(hidden[0]), "Not")
    if negation is None:
        return None
    for one, other in (kept.inputs, kept.inputs[::-1]):
        if one is not None and _cast_of(one) is negation.inputs[0]:
            return other
    return None


def _cast_of(value: ir.Value) -> ir.Value | None:
    """The boolean value that a value is cast from; None if there is none."""
    source = value_before(value, "Cast")
    return source if source is not None and source.dtype == ir.DataType.BOOL else None
