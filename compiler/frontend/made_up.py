"""How to make up sensible arrays for a model's inputs, by their roles."""

from __future__ import annotations

import onnx_ir as ir

from splitc.runtime.manifest import Fill, Role


def choose_fill(value: ir.Value, role: Role | None) -> Fill:
    """How to fill the input `value`.

    Indices stay below the number of rows of their table, positions count up, masks are ones. Other floating point
    inputs are normally distributed; other integers and booleans are ones, since they are switches and lengths.
    """
    if role is not None and role.kind == "indices":
        return Fill("randint", high=role.rows)
    if role is not None and role.kind == "positions":
        return Fill("arange", high=role.rows)
    is_number = value.dtype is not None and value.dtype.is_floating_point()
    return Fill("normal" if is_number and (role is None or role.kind != "mask") else "ones")
