"""Shapes that say how many axes a value has, and no size.

An engine can't infer that of a value that comes from outside, and some operators need it: a Scan of ONNX Runtime. It is
told no more than that: with sizes that it could not infer in the unsplit model, it would fuse more.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from splitc.compiler.frontend.origins import origin_of

_AXES = "splitc.axes"


def note_axes(counts: Mapping[ir.Value, int]) -> None:
    """Note how many axes the values of a model have, for `open_shape` of their copies."""
    for value, count in counts.items():
        value.meta[_AXES] = count


def open_shape(value: ir.Value) -> ir.Shape | None:
    """As many unknown sizes as a copy of one of the model's values has axes; None if that is not known."""
    count = (origin_of(value) or value).meta.get(_AXES)
    return None if count is None else ir.Shape([None] * count)
