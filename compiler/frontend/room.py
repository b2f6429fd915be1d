"""Marks of inputs whose sizes are not those of other values, whatever their symbols.

Some have room along an axis after their filled part: caches that an engine writes in place. Others may be left out of a
request. A third mark is for inputs that only exist for a size of others: the runtime feeds them.
"""

from __future__ import annotations

import onnx_ir as ir

_ROOM = "splitc.room"
_CAPACITY = "splitc.capacity"
_LEFT_OUT = "splitc.left_out"
_SAYS_SIZE = "splitc.says_size"


def give_room(value: ir.Value, axis: int) -> None:
    """Mark an input that may be longer along this axis than its filled part."""
    value.meta[_ROOM] = axis


def give_capacity(value: ir.Value, axis: int) -> None:
    """Mark a cache that the model itself writes in place: a sequence may give it room along this axis."""
    value.meta[_CAPACITY] = axis


def may_be_left_out(value: ir.Value) -> None:
    """Mark an input that requests may leave out."""
    value.meta[_LEFT_OUT] = True


def says_nothing(value: ir.Value, axis: int) -> bool:
    """Whether a size of an input must not be taken for the size of other values."""
    return _LEFT_OUT in value.meta or axis in (value.meta.get(_ROOM), value.meta.get(_CAPACITY))


def may_have_room(value: ir.Value) -> bool:
    """Whether an input may be longer than its filled part."""
    return _ROOM in value.meta


def is_to_say_a_size(value: ir.Value) -> None:
    """Mark an input that exists only for a size that others have."""
    value.meta[_SAYS_SIZE] = True


def says_a_size(value: ir.Value) -> bool:
    """Whether an input exists only for a size that others have."""
    return _SAYS_SIZE in value.meta
