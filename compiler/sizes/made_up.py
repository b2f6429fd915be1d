"""Chooses how to generate plausible arrays for a model's inputs, by their roles."""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.inference.shapes import sizes_of
from splitc.compiler.normal_form.binding import Fixed
from splitc.runtime.package import manifest as m


def choose_fill(value: ir.Value, role: m.Role | None) -> m.Fill:
    """How to fill the input `value`.

    Indices are below the number of rows of their table, positions count up, masks are ones, and padding, which is
    masked where it is true, is zeros. Other floating-point inputs are normally distributed. Other integers and booleans
    are ones, since they are switches and lengths.
    """
    if role is not None and role.kind == "indices":
        return m.Fill("randint", high=role.rows)
    if role is not None and role.kind == "positions":
        return m.Fill("arange", high=role.rows)
    if role is not None and role.kind == "padding":
        return m.Fill("zeros")
    is_number = value.dtype is not None and value.dtype.is_floating_point()
    return m.Fill("normal" if is_number and (role is None or role.kind != "mask") else "ones")


def describe_tensor(value: ir.Value) -> m.Tensor:
    """The manifest's entry for an input or output."""
    assert isinstance(value.type, ir.TensorType)
    return m.Tensor(value.name or "", str(value.type.dtype.numpy()), describe_shape(value.shape))


def describe_shape(shape: ir.Shape | None) -> m.Shape:
    """A shape of numbers and symbols, as in the manifest."""
    return None if shape is None else sizes_of(shape)


def describe_fixed(fixed: Fixed) -> m.FixedInput:
    """The manifest's entry for a bound or removed input."""
    tensor = describe_tensor(fixed.input)
    shape = tensor.shape if fixed.value is None else list(fixed.value.shape)
    return m.FixedInput(tensor.name, tensor.dtype, shape, None if fixed.value is None else fixed.value.tolist())
