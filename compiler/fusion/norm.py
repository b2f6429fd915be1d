"""Fuses decomposed RMSNorm (Zhang and Sennrich, 2019): x / sqrt(mean(x^2) + epsilon) x weights, along one axis.

If x is y - mean(y), the norm is a LayerNorm of y, as all exporters write it below opset 17, perhaps with a bias.

ONNX Runtime itself fuses some forms that divide by the root. Torch's exporters multiply by its reciprocal: ONNX Runtime
leaves that as six or more nodes, in float32 between casts. A norm may have no weights, or get them after a reshape.

Norms in float32 between casts from and to half precision, as of diffusers, become norms of values of that type: the
kernels compute in float32 anyway, and read and write half the bytes. A Transpose before a norm moves behind it.

Norms along another axis than the last, as along the channels of images, get a Transpose before and one behind.

A value divided by its length (the root of its sum of squares) is an RMSNorm too, times the root of the axis' size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from splitc.compiler.fusion.modulation import fuse_modulation
from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.matching import (
    combined,
    constant,
    is_onnx,
    list_of,
    made_by,
    only_user,
    root_of_square,
    tensor_of,
    value_before,
)
from splitc.compiler.graphs.walks import producer_of
from splitc.compiler.nodes import known_tensor, settings_of
from splitc.compiler.patterns.context import Context
from splitc.compiler.patterns.errors import NotFusedError
from splitc.compiler.patterns.kernels import check_type
from splitc.compiler.patterns.operand import Operand, factor_of, half_result, half_source, untransposed
from splitc.compiler.patterns.sizes import Axis, Sizes, is_one
from splitc.compiler.patterns.writing import Writer
from splitc.runtime.arrays.array import Array

OPERATOR, CENTERED = "SimplifiedLayerNormalization", "LayerNormalization"
# Lengths that are bounded below by up to this are those of vectors of zeros: torch's normalize has 1e-12, ScaleNorm
# 1e-5.
SHORT = 1e-5
# A number up to this, added to lengths, changes them by no more than rounding: 1e-8 is written to avoid zeros.
ROUNDED = 1e-7
# From here on a norm along another axis than the last is faster with transposes: of images of 128 x 128 on a CPU core
# 0.3 times as fast with 4 channels, 0.6 with 8, 1.3 with 16, 5 with 64.
NARROW = 16
# The relative tolerance of a factor that is one.
CLOSE = 1e-6


@dataclass(frozen=True)
class Norm:
    """An RMSNorm: `normal` is `data`, divided by the root of the mean square along an `axis`.

    Or a LayerNorm, whose `operator` also subtracts the mean. `output` is `normal` times `factor` and the first of the
    `weights`, plus the second, as far as there are any.
    """

    operator: str
    axis: int
    data: ir.Value
    normal: ir.Value
    epsilon: float
    output: ir.Value
    weights: tuple[ir.Value, ...] = ()
    factor: float = 1.0

    @property
    def source(self) -> ir.Value:
        """The data before a cast to float32, in which the operator computes anyway."""
        value = value_before(self.data, "Cast")
        return value if value is not None and value.dtype == self.output.dtype else self.data


# Operators that normalize the last axis, unless their attribute `axis` names another.
OPERATORS = frozenset({CENTERED, "RMSNormalization", OPERATOR})


def fuse_norm(mean: ir.Node, context: Context) -> str | None:
    """Fuse the norm around a mean, and its modulation. Returns the norm's operator; None if there is no norm."""
    norms = find_norms(mean)
    if not norms:
        return None
    check_type(norms[0].source, context.gains.parts)
    norm = write_norm(norms, context)
    with suppress(NotFusedError):  # the norm alone is better than its parts
        fuse_modulation(norm, context)
    return norm.op_type


def move_transpose(norm: ir.Node, context: Context) -> str | None:
    """Move a Transpose that keeps the last axis from before a norm to behind it, where attention may absorb it.

    Returns the norm's operator; None if there is no such Transpose.
    """
    value = norm.inputs[0] if is_onnx(norm, *OPERATORS) else None
    node = made_by(value, "Transpose")
    if value is None or node is None or len(value.uses()) > 1 or value.is_graph_output() or len(norm.outputs) > 1:
        return None
    rank = len(node.attributes.get_ints("perm", ()))
    traced = untransposed(value, rank)
    is_last = norm.attributes.get_int("axis", -1) in (-1, rank - 1)
    if not rank or not is_last or traced.axes[-1] != rank - 1:
        return None
    output = norm.outputs[0]
    check_type(output, context.gains.parts)
    own = context.sizes.known(traced.value, "its input")
    work = Writer.of(output, context)
    made = work.add("norm", norm.op_type, [traced.value, *norm.inputs[1:]], output, own, **settings_of(norm))
    work.take_place(work.transpose(Operand(made, traced.axes), "norm_turned"), output)
    return norm.op_type


def find_norms(mean: ir.Node) -> list[Norm]:
    """The norm around a mean of squares, or around a length.

    With its weights and bias, without the bias, and without both; [] if there is none. Raises NotFusedError for a form
    that the operator does not have.
    """
    if is_onnx(mean, "ReduceL2"):
        return _find_by_length(mean)
    axis = _averaged_axis(mean) if is_onnx(mean, "ReduceMean") else None
    if axis is None:
        return []
    data = root_of_square(mean.inputs[0])
    root = None if data is None else _find_root(mean.outputs[0])
    if data is None or root is None:
        return []
    normal = _divided(data, *root[:2])
    if normal is None:
        return []
    if not mean.attributes.get_int("keepdims", 1):
        raise NotFusedError("its mean drops the axis (keepdims=0)")
    cast = only_user(normal, "Cast")
    value = normal if cast is None else cast.outputs[0]
    whole = _before_centering(data, axis, value)
    norm = Norm(OPERATOR, axis, data, value, root[2], value)
    return _with_weights(norm if whole is None else replace(norm, operator=CENTERED, data=whole), cast is None)


def _find_by_length(length: ir.Node) -> list[Norm]:
    """The norm of a value that is divided by its length, which may have a lower bound; as `find_norms`."""
    (data, *_), axis, (value, divisor), bound = length.inputs, _averaged_axis(length), _scaled(length.outputs[0]), 0.0
    bounded = only_user(value, "Clip") or only_user(value, "Max") or only_user(value, "Add")
    if bounded is not None and len(bounded.inputs) == 2:
        number = _number(bounded)
        value, bound = bounded.outputs[0], 1.0 if number is None else number
    is_added = bounded is not None and bounded.op_type == "Add"
    if data is None or data.shape is None or axis is None or not 0 <= bound <= (ROUNDED if is_added else SHORT):
        return []
    size, normal = data.shape[axis], _divided(data, value, is_reciprocal=False)
    if normal is None or not isinstance(size, int) or not size or not length.attributes.get_int("keepdims", 1):
        return []
    output, factor = _scaled(normal)
    factor *= size**-0.5 / divisor
    epsilon = (bound / divisor) ** 2 / size
    return _with_weights(Norm(OPERATOR, axis, data, normal, epsilon, output, factor=factor), may_narrow=False)


def _scaled(value: ir.Value) -> tuple[ir.Value, float]:
    """A value after it is multiplied or divided by constants, and the product of these factors."""
    factor = 1.0
    while (node := only_user(value, "Mul") or only_user(value, "Div")) is not None:
        scaled = factor_of(node)
        if scaled is None or scaled[0] is not value:
            break
        value, factor = node.outputs[0], factor * scaled[1]
    return value, factor


def _averaged_axis(mean: ir.Node) -> int | None:
    """The axis along which a mean is taken; None if there are several, or it is not known."""
    axes, data = list_of(mean, "axes") or (), mean.inputs[0]
    return axes[0] % len(data.shape) if len(axes) == 1 and data is not None and data.shape is not None else None


def _before_centering(value: ir.Value, axis: int, normal: ir.Value) -> ir.Value | None:
    """The x of x - mean(x), along an axis; None for any other value.

    The difference may be cast from half precision, if what is `normal` is cast back: the operator does the same inside.
    """
    narrow = half_source(value)
    node = made_by(narrow if narrow is not None and narrow.dtype == normal.dtype else value, "Sub")
    mean = None if node is None else made_by(node.inputs[1], "ReduceMean")
    if node is None or mean is None or mean.inputs[0] is not node.inputs[0]:
        return None
    keeps_axes = mean.attributes.get_int("keepdims", 1) == 1
    return node.inputs[0] if keeps_axes and _averaged_axis(mean) == axis else None


def _find_root(mean: ir.Value) -> tuple[ir.Value, bool, float] | None:
    """The root of a mean plus epsilon, or its reciprocal; whether it is the reciprocal; and epsilon.

    Nothing is added for an epsilon of 0, as 1e-12 is in half precision.
    """
    added = only_user(mean, "Add")
    total, epsilon = (mean, 0.0) if added is None else (added.outputs[0], _number(added))
    if epsilon is None:
        return None
    power = only_user(total, "Pow")
    if power is not None:
        return (power.outputs[0], True, epsilon) if constant(power.inputs[1]) == -0.5 else None
    root = only_user(total, "Sqrt")
    if root is None:
        return None
    reciprocal = only_user(root.outputs[0], "Reciprocal") or only_user(root.outputs[0], "Div")
    if reciprocal is not None and (reciprocal.op_type == "Reciprocal" or constant(reciprocal.inputs[0]) == 1):
        return reciprocal.outputs[0], True, epsilon
    return root.outputs[0], False, epsilon


def _number(node: ir.Node) -> float | None:
    """The constant among a node's inputs, if there is one."""
    return next((number for value in node.inputs if (number := constant(value)) is not None), None)


def _divided(data: ir.Value, root: ir.Value, is_reciprocal: bool) -> ir.Value | None:
    """The data divided by the root, or multiplied by its reciprocal; None if the root is used otherwise."""
    node = only_user(root, "Mul" if is_reciprocal else "Div")
    if node is None or set(node.inputs) != {data, root} or (not is_reciprocal and node.inputs[0] is not data):
        return None
    return node.outputs[0]


def _with_weights(norm: Norm, may_narrow: bool) -> list[Norm]:
    """The norm, before it the same with weights, and before that the same with a bias, if it has them.

    A cast of the result to half precision is included if `may_narrow`: the norm was not cast before.
    """
    norms = [norm]
    for operator in ("Mul", "Add") if norm.operator == CENTERED else ("Mul",):
        step = combined(norms[0].output, operator)
        if step is None:
            break
        narrow = half_result(step[1]) if may_narrow else None
        may_narrow = may_narrow and narrow is None
        norms.insert(0, replace(norms[0], output=narrow or step[1], weights=(*norms[0].weights, step[0])))
    return norms


def write_norm(norms: Sequence[Norm], context: Context) -> ir.Node:
    """Replace the first of the norms whose weights and bias are rows by the operator, in place. Returns its node.

    The weights are 1 if the norm has none. Raises NotFusedError if the operator can't express it; then nothing is
    changed.
    """
    sizes = context.sizes
    axes = sizes.axes(norms[-1].data)
    norm = next((norm for norm in norms[:-1] if axes and _has_rows(norm, axes, sizes)), norms[-1])
    dtype = norm.source.dtype
    if axes is None or dtype is None or norm.output.dtype is None or norm.normal.dtype is None:
        raise NotFusedError("its shape or its type is not known")
    own = axes[norm.axis : norm.axis + 1]
    if own[0].fixed is None:
        raise NotFusedError("the size of the axis that it normalizes is dynamic")
    data, work = norm.source, Writer.of(norm.output, context)
    before = with_axis_last(data, len(axes), norm.axis, work)
    scale = 1.0 if abs(norm.factor - 1) < CLOSE else norm.factor
    rows = [] if norm.weights else [work.editor.constant(np.full(own[0].fixed, scale, dtype.numpy()))]
    for name, weights in zip(("weights", "bias"), norm.weights, strict=False):
        row = work.reshape(weights, own, f"norm_{name}_row")
        if name == "weights" and scale != 1:
            row = work.add("norm_scaled", "Mul", [row, work.editor.scalar(scale, row)], row, own)
        rows.append(work.cast(row, data, f"norm_{name}"))
    inputs, epsilon = [before.value, *rows], norm.epsilon
    normal = work.add(
        "norm", norm.operator, inputs, data, work.axes(before.value), axis=-1, epsilon=epsilon, stash_type=1
    )
    made = work.transpose(Operand(normal, before.axes), "norm_turned")
    work.take_place(work.cast(made, norm.output, "norm_cast"), norm.output)
    return producer_of(normal)


def with_axis_last(data: ir.Value, rank: int, axis: int, work: Writer) -> Operand:
    """The data as a value before a Transpose, or behind a new one, whose last axis is this axis of the data.

    Raises NotFusedError if that would be slower than the norm as it is.
    """
    traced = untransposed(data, rank)
    if traced.axes[axis] == rank - 1 and work.sizes.axes(traced.value) is not None:
        return traced
    if axis < rank - 1 and (work.axes(data)[axis].fixed or 0) < NARROW:
        raise NotFusedError("the axis that it normalizes is not the last, and too short for transposes to be faster")
    order = (*(other for other in range(rank) if other != axis), axis)
    turned = work.transpose(Operand(data, order), "norm_data")
    return Operand(turned, tuple(order.index(place) for place in range(rank)))


def _has_rows(norm: Norm, axes: Sequence[Axis], sizes: Sizes) -> bool:
    """Whether a norm's weights and bias are rows, with one number for each element of the axis that it normalizes."""
    output, behind = sizes.axes(norm.output), len(axes) - norm.axis - 1
    for row in (sizes.axes(weights) for weights in norm.weights):
        if row is None or len(row) <= behind or not is_one(one for n, one in enumerate(row[::-1]) if n != behind):
            return False
        if row[-1 - behind].size != axes[norm.axis].size:
            return False
    return output is not None and [axis.size for axis in output] == [axis.size for axis in axes]


def narrow_norm(norm: ir.Node, context: Context) -> str | None:
    """Compute a norm in half precision that is computed in float32 between casts. Returns its operator.

    None for any other node, and if the narrow type can't hold its weights exactly.
    """
    if not is_onnx(norm, *OPERATORS) or any(value.uses() for value in norm.outputs[1:]):
        return None
    data, output = None if norm.inputs[0] is None else half_source(norm.inputs[0]), half_result(norm.outputs[0])
    if data is None or output is None or data.dtype != output.dtype:
        return None
    if any(value is not None and not _is_exact(value, data) for value in norm.inputs[1:]):
        return None
    check_type(output, context.gains.parts)
    axes = context.sizes.known(data, "its input")
    weights = [None if value is None else _narrow_weight(value, data, context.editor) for value in norm.inputs[1:]]
    work = Writer.of(output, context)
    work.take_place(work.add("norm", norm.op_type, [data, *weights], data, axes, **settings_of(norm)), output)
    return norm.op_type


def _is_exact(value: ir.Value, like: ir.Value) -> bool:
    """Whether the type of another value holds a weight exactly: it is cast from it, or requests can't override it."""
    if (source := half_source(value)) is not None:
        return source.dtype == like.dtype
    if (tensor := known_tensor(value)) is None:
        return False
    numbers = tensor.numpy()
    with np.errstate(over="ignore"):
        return bool(np.array_equal(_narrowed(numbers, like).astype(numbers.dtype), numbers))


def _narrow_weight(value: ir.Value, like: ir.Value, editor: Editor) -> ir.Value:
    """A weight in the type of another value."""
    return half_source(value) or editor.constant(_narrowed(tensor_of(value).numpy(), like))


def _narrowed(numbers: Array, like: ir.Value) -> Array:
    assert like.dtype is not None
    return numbers.astype(like.dtype.numpy())
