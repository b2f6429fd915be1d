"""Inputs with room behind what fills them: caches that an engine writes in place.

Their size along that axis says nothing of other values, whatever symbol it has.
"""

from __future__ import annotations

import onnx_ir as ir

_ROOM = "splitc.room"


def give_room(value: ir.Value, axis: int) -> None:
    """Note that an input may be longer along this axis than what fills it."""
    value.meta[_ROOM] = axis


def may_have_room(value: ir.Value) -> bool:
    """Whether an input may be longer than what fills it."""
    return _ROOM in value.meta


def has_room(value: ir.Value, axis: int) -> bool:
    """Whether an input may be longer along this axis than what fills it."""
    return value.meta.get(_ROOM) == axis
