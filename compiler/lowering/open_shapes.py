"""Open shapes: the number of a value's axes, without their sizes.

An engine can't infer the number for a value that it receives, and some operators need it (Scan in ONNX Runtime). Sizes
are left out: with sizes that it could not infer in the unsplit model, the engine would fuse more.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from splitc.compiler.frontend.origins import described

_AXES = "splitc.axes"


def note_axes(counts: Mapping[ir.Value, int]) -> None:
    """Record the number of axes of a model's values, for `open_shape` of their copies."""
    for value, count in counts.items():
        value.meta[_AXES] = count


def open_shape(value: ir.Value) -> ir.Shape | None:
    """The open shape of a copy of one of the model's values; None if its number of axes is not known."""
    count = described(value).meta.get(_AXES)
    return None if count is None else ir.Shape([None] * count)
