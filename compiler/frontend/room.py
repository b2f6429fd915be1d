"""Inputs whose sizes say nothing of other values, whatever symbols they have.

Some have room along an axis behind what fills it: caches that an engine writes in place. Others may be left out of a
request. And inputs that are there to say a size of others: the runtime feeds them.
"""

from __future__ import annotations

import onnx_ir as ir

_ROOM = "splitc.room"
_LEFT_OUT = "splitc.left_out"
_SAYS_SIZE = "splitc.says_size"


def give_room(value: ir.Value, axis: int) -> None:
    """Note that an input may be longer along this axis than what fills it."""
    value.meta[_ROOM] = axis


def may_be_left_out(value: ir.Value) -> None:
    """Note that requests may leave an input out."""
    value.meta[_LEFT_OUT] = True


def says_nothing(value: ir.Value, axis: int) -> bool:
    """Whether a size of an input is not to be read as that of other values."""
    return _LEFT_OUT in value.meta or value.meta.get(_ROOM) == axis


def may_have_room(value: ir.Value) -> bool:
    """Whether an input may be longer than what fills it."""
    return _ROOM in value.meta


def is_to_say_a_size(value: ir.Value) -> None:
    """Note that an input is there for a size that others have."""
    value.meta[_SAYS_SIZE] = True


def says_a_size(value: ir.Value) -> bool:
    """Whether an input is there for a size that others have."""
    return _SAYS_SIZE in value.meta
