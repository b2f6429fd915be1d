"""Fuses adaptive LayerNorm: a LayerNorm with the computed scale and shift that follow it.

Diffusion transformers have it (adaLN, Peebles and Xie, 2022): norm(x) x (1 + scale) + shift, with a scale and a shift
for each image. LayerNormalization takes both as [batch or 1, 1, size], and reads x once. In float16 models, the norm,
or all of the pattern, may be computed in float32 between casts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from splitc.compiler.graphs.matching import combined, is_onnx
from splitc.compiler.nodes import known_tensor
from splitc.compiler.operators.gpu_kernels import HALVES
from splitc.compiler.patterns.context import Context
from splitc.compiler.patterns.errors import NotFusedError
from splitc.compiler.patterns.kernels import check_type
from splitc.compiler.patterns.operand import half_result, half_source
from splitc.compiler.patterns.sizes import ONE, Axis, Sizes, fixed_axis
from splitc.compiler.patterns.writing import Writer

OPERATOR = "LayerNormalization"


@dataclass(frozen=True)
class Modulation:
    """`norm`, a LayerNorm of `data`, times `scale`, plus `shift`.

    `own` are the LayerNorm's weights and bias: None for weights that are all 1, and for a bias of 0 or none.
    """

    norm: ir.Node
    data: ir.Value
    scale: ir.Value
    shift: ir.Value
    output: ir.Value
    own: tuple[ir.Value | None, ir.Value | None] = (None, None)


def fuse_modulation(norm: ir.Node, context: Context) -> str | None:
    """Fuse a norm and its modulation. Returns their operator; None if there is no modulation."""
    modulation = find_modulation(norm) if context.gains.modulations else None
    if modulation is None:
        return None
    check_type(modulation.output, context.gains.modulations)
    write_modulation(modulation, context)
    return OPERATOR


def find_modulation(norm: ir.Node) -> Modulation | None:
    """The modulation that follows a LayerNorm; None if there is none, or its scale or shift is constant."""
    if not is_onnx(norm, OPERATOR) or any(value.uses() for value in norm.outputs[1:]):
        return None
    data, normal = norm.inputs[0], norm.outputs[0]
    halves = None if data is None else half_source(data)
    if halves is not None and (narrow := half_result(normal)) is not None:
        data, normal = halves, narrow
    product = combined(normal, "Mul")
    total = product and combined(product[1], "Add")
    if data is None or not product or not total:
        return None
    (scale, _), (shift, output) = product, total
    if halves is not None and data is not halves and (narrow := half_result(output)) is not None:
        data, output = halves, narrow
    if scale.const_value is not None or shift.const_value is not None:
        return None
    weights, bias = (*norm.inputs[1:], None, None)[:2]
    own = (
        None if weights is None or _is_all(weights, 1.0) else weights,
        None if bias is None or _is_all(bias, 0.0) else bias,
    )
    return Modulation(norm, data, scale, shift, output, own)


def _is_all(value: ir.Value, number: float) -> bool:
    """Whether all elements of a weight are this number, and requests can't override it."""
    tensor = known_tensor(value)
    return tensor is not None and bool(np.all(tensor.numpy() == number))


def write_modulation(modulation: Modulation, context: Context) -> None:
    """Replace a modulated norm by the operator, in place.

    Raises NotFusedError if the operator can't express it; then nothing is changed.
    """
    norm, data, output = modulation.norm, modulation.data, modulation.output
    axes = context.sizes.axes(data)
    if axes is None or len(axes) != 3 or norm.attributes.get_int("axis", -1) not in (-1, 2):
        raise NotFusedError("the input of its norm does not have three axes, of which it normalizes the last")
    given = {modulation.scale.dtype, modulation.shift.dtype}
    may_be_cast = given == {ir.DataType.FLOAT} and data.dtype in HALVES
    if data.dtype != output.dtype or not (given == {data.dtype} or may_be_cast):
        raise NotFusedError("its norm, scale and shift differ in type")
    row = _row(modulation, axes, context.sizes)
    work = Writer.of(output, context, data)
    scale, shift = (
        work.reshape(work.cast(value, data, f"{role}_cast"), row, role)
        for role, value in (("scale", modulation.scale), ("shift", modulation.shift))
    )
    scale, shift = _with_own(modulation, scale, shift, work)
    epsilon = norm.attributes.get_float("epsilon", 1e-5)
    made = work.add("norm", OPERATOR, [data, scale, shift], data, axes, axis=-1, epsilon=epsilon)
    work.take_place(made, output)


def _with_own(modulation: Modulation, scale: ir.Value, shift: ir.Value, work: Writer) -> tuple[ir.Value, ir.Value]:
    """Scale and shift, merged with the norm's weights and bias: (x w + b) s + t is x (w s) + (b s + t)."""
    weights, bias = (
        None if value is None else work.cast(value, scale, f"{role}_cast")
        for role, value in (("weights", modulation.own[0]), ("bias", modulation.own[1]))
    )
    axes, given = work.axes(scale), scale
    if weights is not None:
        scale = work.add("scale_weighted", "Mul", [given, weights], scale, axes)
    if bias is not None:
        scaled = work.add("bias_scaled", "Mul", [given, bias], scale, axes)
        shift = work.add("shift_biased", "Add", [scaled, shift], scale, axes)
    return scale, shift


def _row(modulation: Modulation, axes: tuple[Axis, ...], sizes: Sizes) -> tuple[Axis, ...]:
    """The axes [batch or 1, 1, size] of scale and shift. Raises NotFusedError if they have others."""
    made, first = [], fixed_axis(1)
    for value in (modulation.scale, modulation.shift):
        own = sizes.known(value, "its scale and shift")
        row = [ONE] * (3 - len(own)) + [axis.size for axis in own]
        if row[0] not in (ONE, axes[0].size) or row[1:] != [ONE, axes[2].size]:
            raise NotFusedError("its scale and shift are not one row for each batch entry")
        made.append(row)
        first = own[0] if len(own) == 3 else first
    if made[0] != made[1]:
        raise NotFusedError("its scale and shift differ in shape")
    return (first if made[0][0] == ONE else axes[0], fixed_axis(1), axes[2])
