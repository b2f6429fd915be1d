"""Open shapes: the number of a value's axes, without their sizes.

An engine can't infer the number of axes of a value that it receives, and some operators need it (Scan in ONNX Runtime).
Sizes are omitted: if an engine knew more sizes than those of the unsplit model, it would fuse more nodes.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from splitc.compiler.graphs.origins import described

_AXES = "splitc.axes"


def note_axes(counts: Mapping[ir.Value, int]) -> None:
    """Record the numbers of axes of a model's values, which `open_shape` returns for copies of the values."""
    for value, count in counts.items():
        value.meta[_AXES] = count


def open_shape(value: ir.Value) -> ir.Shape | None:
    """The open shape of a copy of a model's value; None if the number of axes is not known."""
    count = described(value).meta.get(_AXES)
    return None if count is None else ir.Shape([None] * count)
