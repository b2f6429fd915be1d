"""Operators that gather or scatter elements by index."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.operation import LINEAR, Operation
from splitc.compiler.operators.operator import Operator
from splitc.runtime.arrays.array import Array

# Reasons for whole axes.
SELECTS, WRITES = "it selects elements by index", "it writes elements by index"


def gather(op: Operation) -> None:
    """The axes of the indices replace the indexed axis."""
    data, indices, output = op.input(0), op.input(1), op.output()
    axis = op.number("axis", 0) % len(data)
    op.relate_all(data[:axis], output[:axis])
    op.relate_all(indices, output[axis : axis + len(indices)])
    op.relate_all(data[axis + 1 :], output[axis + len(indices) :])
    _look_up(op, axis)
    op.linear = LINEAR


def gather_blocks(op: Operation) -> None:
    """Gather of quantized rows, with a scale, and perhaps a zero point, for each block along another axis."""
    data, indices, output = op.input(0), op.input(1), op.output()
    axis = op.number("gather_axis", 0) % len(data)
    op.relate_all(indices, output[axis : axis + len(indices)])
    for axes in op.given((2, 3)):
        if ax.size_of(axes[axis]) == ax.size_of(data[axis]):
            op.relate(axes[axis], data[axis])
    _look_up(op, axis)


def _look_up(op: Operation, axis: int) -> None:
    """The rows of an embedding table may be sharded. Any other indexed axis is needed whole."""
    data = op.input(0)
    if axis == 0 and len(data) == 2 and 0 in op.weights and op.constants[1] is None:
        op.free([data[0]])
        op.is_lookup = True
        op.contracted = data[0]
    elif not _select_section(op, axis):
        op.whole([data[axis]], SELECTS)


def _select_section(op: Operation, axis: int) -> bool:
    """Relate the one element that a constant index selects, as a section, as a Slice would. Returns whether it can be.

    Falcon has keys and values in one axis with the queries' heads, and selects them by index.
    """
    data, places = op.input(0), op.numbers(1) if len(op.input(1)) == 1 else None
    if places is None or len(places) != 1 or len(data) < 2:
        return False
    size = ax.size_of(data[axis])
    place = places[0] + size if places[0] < 0 else places[0]
    if not 0 <= place < size:
        return False
    head, row, tail = op.cut(data[axis], [place, 1, size - place - 1])
    op.relate(row, op.output()[axis])
    op.declare_sizes(1, [ax.joined(row, tail) if places[0] < 0 else head])
    return True


def gather_elements(op: Operation) -> None:
    """Axes other than the indexed one are the same, unless indices have fewer elements along them."""
    axis = op.number("axis", 0) % len(op.input(0))
    for place, (data, indices, output) in enumerate(zip(op.input(0), op.input(1), op.output(), strict=True)):
        op.relate(indices, output)
        if place != axis:
            op.broadcast([data], [output])
    op.linear = LINEAR


def gather_nd(op: Operation) -> None:
    """The leading axes of data are indexed, and the others stay. How many these are follows from the ranks alone."""
    data, indices, output = op.input(0), op.input(1), op.output()
    batch = op.number("batch_dims", 0)
    stay = len(output) - (len(indices) - 1)
    op.linear = LINEAR
    op.relate_all(data[len(data) - stay :], output[len(output) - stay :])
    op.relate_all(indices[:-1], output)
    op.relate_all(data[:batch], output)


def scatter_nd(op: Operation) -> None:
    """The axes that are not indexed are the same in data, updates and output. How many follows from the ranks alone."""
    data, indices, updates, output = op.input(0), op.input(1), op.input(2), op.output()
    indexed = len(data) - (len(updates) - (len(indices) - 1))
    op.relate_all(data[indexed:], output[indexed:])
    op.relate_all(updates[len(indices) - 1 :], output[indexed:])
    op.whole([*data[:indexed], *output[:indexed]], WRITES)
    if op.node.attributes.get_string("reduction", "none") in ("none", "add"):
        op.linear = (frozenset([0, 2]),)


def scatter_elements(op: Operation) -> None:
    """An axis other than the written one is the same if indices, updates and output have the same size along it."""
    axis = op.number("axis", 0) % len(op.input(0))
    data, indices, updates, output = op.input(0), op.input(1), op.input(2), op.output()
    op.relate_all(data, output)
    op.whole([output[axis]], WRITES)
    for place, axes in enumerate(zip(indices, updates, output, strict=True)):
        if place != axis and len(set(map(ax.size_of, axes))) == 1:
            op.relate(axes[0], axes[2])
            op.relate(axes[1], axes[2])
        elif place != axis:
            op.whole(axes, "it writes only a part")


def scatter_places(op: Operation, number: int) -> int | None:
    """Example indices: 0 for an axis of one element."""
    axis = op.number("axis", 0) % len(op.input(0))
    return 0 if number == 1 and ax.size_of(op.input(0)[axis]) == 1 else None


def tensor_scatter(op: Operation) -> None:
    """All axes of the cache and of its updates are the same, except the written one."""
    data, updates, output = op.input(0), op.input(1), op.output()
    axis = op.number("axis", -2) % len(data)
    op.relate_all(data, output)
    for place in range(len(data)):
        if place != axis:
            op.relate(updates[place], output[place])
    op.whole([output[axis], updates[axis]], WRITES)
    if op.has(2):
        op.relate(op.input(2)[0], output[0])


def marked_places(node: ir.Node, places: Array, count: int) -> Array:
    """The booleans that a OneHot returns for constant places, along a new axis of `count`."""
    marked = places[..., None] % count == np.arange(count)
    is_inside = (places >= -count) & (places < count)
    return np.moveaxis(marked & is_inside[..., None], -1, node.attributes.get_int("axis", -1))


def one_hot(op: Operation) -> None:
    """The output has one more axis than the indices."""
    output = op.output()
    axis = op.number("axis", -1) % len(output)
    op.relate_all(op.input(0), [*output[:axis], *output[axis + 1 :]])


def triangle(op: Operation) -> None:
    """The last two axes are matrices."""
    op.relate_all(op.input(0)[:-2], op.output()[:-2])
    op.linear = LINEAR


def block_rows_shape(context: Any, node: ir.Node) -> None:
    """The shape of a Gather, in the type of the scales. Along the last axis, a byte may hold several numbers."""
    data, indices, scales = node.inputs[:3]
    assert data is not None and indices is not None and scales is not None
    if data.shape is None or indices.shape is None:
        context.set_shape_and_dtype(node.outputs[0], None, scales.dtype)
        return
    sizes = list(data.shape)
    axis = node.attributes.get_int("gather_axis", 0) % len(sizes)
    if data.dtype == ir.DataType.UINT8:
        packed = 8 // node.attributes.get_int("bits", 4)
        sizes[-1] = sizes[-1] * packed
    shape = [*sizes[:axis], *indices.shape, *sizes[axis + 1 :]]
    context.set_shape_and_dtype(node.outputs[0], ir.Shape(shape), scales.dtype)


def unique_shapes(context: Any, node: ir.Node) -> None:
    """Unique values or, with an axis, unique slices, of dynamic number. The library's rule drops the other axes."""
    data, count, axis = node.inputs[0], context.new_symbolic_dim(), node.attributes.get_int("axis", None)
    if data is None or data.shape is None or data.dtype is None:
        return
    sizes, length = [count], context.new_symbolic_dim()
    if axis is not None:
        sizes, length = list(data.shape), data.shape[axis]
        sizes[axis] = count
    shapes = [sizes, [count], [length], [count]]
    for value, shape in zip(node.outputs, shapes, strict=False):
        dtype = data.dtype if value.index() == 0 else ir.DataType.INT64
        context.set_shape_and_dtype(value, ir.Shape(shape), dtype)


OPERATORS = (
    Operator("Unique", shapes=unique_shapes),
    Operator(
        "Gather",
        gather,
        reads_part=True,
        shape_arithmetic=True,
        passes_sizes=True,
        lookups=((1, 0),),
        sizes_are_offsets=True,
    ),
    Operator("GatherElements", gather_elements, reads_part=True, lookups=((1, 0),)),
    Operator("GatherND", gather_nd, reads_part=True),
    Operator("com.microsoft.GatherBlockQuantized", gather_blocks, shapes=block_rows_shape, lookups=((1, 0),)),
    Operator("OneHot", one_hot, shape_arithmetic=True),
    Operator("NonZero", shape_arithmetic=True),
    Operator("ScatterElements", scatter_elements, positions=(1,), writes_in_place=True, example_input=scatter_places),
    Operator("ScatterND", scatter_nd, positions=(1,), writes_in_place=True),
    Operator("TensorScatter", tensor_scatter, positions=(2,), writes_in_place=True, states={0: 0}),
    Operator("Trilu", triangle, overwrites=True),
)
