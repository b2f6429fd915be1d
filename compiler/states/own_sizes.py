"""Marks inputs whose sizes must not be read as sizes of other values, even if the symbols are equal.

A cache in place may have spare capacity along an axis, behind its filled part. Other inputs may be omitted from a
request. A third mark is for inputs that exist only to have a size, which the runtime feeds.
"""

from __future__ import annotations

import onnx_ir as ir

_ROOM = "splitc.room"
_CAPACITY = "splitc.capacity"
_LEFT_OUT = "splitc.left_out"
_SAYS_SIZE = "splitc.says_size"


def mark_fused_cache(value: ir.Value, axis: int) -> None:
    """Mark a cache that may have spare capacity along this axis, since fusion writes it in place."""
    value.meta[_ROOM] = axis


def mark_model_cache(value: ir.Value, axis: int) -> None:
    """Mark a cache that may have spare capacity along this axis, since the model itself writes it in place."""
    value.meta[_CAPACITY] = axis


def mark_omittable(value: ir.Value) -> None:
    """Mark an input that requests may omit."""
    value.meta[_LEFT_OUT] = True


def has_own_size(value: ir.Value, axis: int) -> bool:
    """Whether a size of an input must not be taken for the size of other values."""
    return _LEFT_OUT in value.meta or axis in (value.meta.get(_ROOM), value.meta.get(_CAPACITY))


def is_fused_cache(value: ir.Value) -> bool:
    """Whether an input is a cache that fusion writes in place (`mark_fused_cache`)."""
    return _ROOM in value.meta


def mark_for_its_size(value: ir.Value) -> None:
    """Mark an input that exists only for its size."""
    value.meta[_SAYS_SIZE] = True


def exists_for_its_size(value: ir.Value) -> bool:
    """Whether an input exists only for its size."""
    return _SAYS_SIZE in value.meta
