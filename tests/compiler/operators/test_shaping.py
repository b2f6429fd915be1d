"""Operators that rearrange axes keep their factors; sizes in the graph become a rank's sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from splitc.compiler.operators.axes import new_axis
from splitc.compiler.operators.operation import Operation
from splitc.compiler.operators.shaping import WHOLE, slice_bounds
from tests.helpers.blocks import FLOAT, SHARES, Block
from tests.helpers.operators import BATCH, INNER, PLACES, Middle, Tiny, as_float, as_image, check_operator, sandwich


def gate(b: Block, v: ir.Value) -> ir.Value:
    first, second = b.ops("Split", v, outputs=2, axis=-1)
    return b.op("Mul", b.op("Sigmoid", first), second)


def uneven_sections(b: Block, v: ir.Value) -> ir.Value:
    first, second = b.ops("Split", v, b.ints(INNER, 8), outputs=2, axis=-1)
    return b.op("Mul", first, b.op("ReduceMean", b.op("MatMul", second, b.w("C", 8, 12)), axes=[-1]))


def halves_along_other_axes(b: Block, v: ir.Value) -> ir.Value:
    """A rank has some elements of all heads of one half, and all elements of some heads of the other."""
    parts = []
    for half, axis in zip(b.ops("Split", v, outputs=2, axis=-1), (2, 3), strict=True):
        by_heads = b.op("Reshape", half, b.ints(0, 0, 4, INNER // 4))
        parts.append(b.op("Reshape", b.op("Softmax", by_heads, axis=axis), b.ints(0, 0, INNER)))
    return b.op("Concat", *parts, axis=-1)


def gate_by_slices(b: Block, v: ir.Value) -> ir.Value:
    first = b.op("Slice", v, b.ints(0), b.ints(INNER), b.ints(2))
    second = b.op("Slice", v, b.ints(INNER), b.ints(2**63 - 1), b.ints(2), b.ints(1))
    return b.op("Mul", b.op("Tanh", first), second)


def negative_slices(b: Block, v: ir.Value) -> ir.Value:
    first = b.op("Slice", v, b.ints(-2 * INNER), b.ints(-INNER), b.ints(-1))
    second = b.op("Slice", v, b.ints(-INNER), b.ints(2 * INNER), b.ints(-1))
    return b.op("Mul", first, second)


def behind_the_text(b: Block, v: ir.Value) -> ir.Value:
    """A fixed number of an image's tokens, which are joined to a text's, and cut off again."""
    image = b.op("Gather", v, b.ints(*range(5), *range(4)), axis=1)
    both = b.op("Tanh", b.op("Concat", v, image, axis=1))
    return b.op("Add", image, b.op("Slice", both, b.shape(v, 1), b.ints(2**63 - 1), b.ints(1)))


def negative_slices_behind_a_whole_part(b: Block, v: ir.Value) -> ir.Value:
    """The first 8 columns are needed whole; a slice from the end begins behind them, on each rank elsewhere."""
    b.give(b.op("Softmax", b.op("Slice", v, b.ints(0), b.ints(-INNER), b.ints(2))), "first", [BATCH, PLACES, 8])
    return b.op("Relu", b.op("Slice", v, b.ints(-INNER), b.ints(2**63 - 1), b.ints(2)))


def strided(b: Block, v: ir.Value) -> ir.Value:
    even = b.op("Slice", v, b.ints(0), b.ints(2 * INNER), b.ints(2), b.ints(2))
    odd = b.op("Slice", v, b.ints(1), b.ints(2 * INNER), b.ints(2), b.ints(2))
    return b.op("Mul", even, odd)


def to_heads_and_back(b: Block, v: ir.Value) -> ir.Value:
    heads = b.op("Transpose", b.op("Reshape", v, b.ints(0, 0, 8, 3)), perm=[0, 2, 1, 3])
    soft = b.op("Softmax", heads, axis=-1)
    return b.op("Reshape", b.op("Transpose", soft, perm=[0, 2, 1, 3]), b.ints(0, 0, INNER))


def merged_with_batch(b: Block, v: ir.Value) -> ir.Value:
    """Batch and heads in one axis, whose size is computed from a Shape of the split value."""
    heads = b.op("Transpose", b.op("Reshape", v, b.ints(0, 0, 8, 3)), perm=[0, 2, 1, 3])
    merged = b.op("Mul", b.shape(heads, 0), b.shape(heads, 1))
    flat = b.op("Reshape", heads, b.op("Concat", merged, b.shape(heads, 2), b.ints(3), axis=0))
    target = b.op("Concat", b.shape(v, 0), b.ints(8), b.shape(v, 1), b.ints(3), axis=0)
    apart = b.op("Reshape", b.op("Exp", b.op("Tanh", flat)), target)
    return b.op("Reshape", b.op("Transpose", apart, perm=[0, 2, 1, 3]), b.op("Shape", v))


def size_as_number(b: Block, v: ir.Value) -> ir.Value:
    """A size of the split value that is used as a number must be the whole value's."""
    size = b.op("Cast", b.op("Gather", b.op("Shape", v), b.constant(2, np.int64), axis=0), to=FLOAT)
    return b.op("Div", v, b.op("Sqrt", size))


def expanded(b: Block, v: ir.Value) -> ir.Value:
    wide = b.op("Unsqueeze", b.op("Reshape", v, b.ints(0, 0, 4, 6)), b.ints(3))
    repeated = b.op("Expand", wide, b.ints(1, 1, 1, 2, 1))
    return b.op("Reshape", repeated, b.ints(0, 0, 2 * INNER))


def tiled(b: Block, v: ir.Value) -> ir.Value:
    return b.op("Tile", v, b.ints(1, 1, 2))


def squeezed(b: Block, v: ir.Value) -> ir.Value:
    return b.op("Squeeze", b.op("Relu", b.op("Unsqueeze", v, b.ints(1))), b.ints(1))


def flattened(b: Block, v: ir.Value) -> ir.Value:
    flat = b.op("Flatten", v, axis=2)
    return b.op("Reshape", flat, b.op("Concat", b.shape(v, 0), b.ints(-1), b.ints(INNER), axis=0))


def concatenated(b: Block, v: ir.Value) -> ir.Value:
    return b.op("Concat", b.op("Relu", v), b.op("Neg", v), axis=-1)


def padded_elsewhere(b: Block, v: ir.Value) -> ir.Value:
    return b.op("Pad", v, b.ints(0, 1, 0, 0, 0, 0))


def expanded_from_one(b: Block, v: ir.Value) -> ir.Value:
    return b.op("Mul", v, b.op("Expand", b.w("row", INNER), b.op("Shape", v)))


def filled(b: Block, v: ir.Value) -> ir.Value:
    """Twos of the value's sizes."""
    return b.op("Mul", v, b.op("ConstantOfShape", b.op("Shape", v), value=ir.tensor([2.0])))


def padded_and_cut(b: Block, v: ir.Value) -> ir.Value:
    """As long as before, shifted by one."""
    return b.op("Pad", v, b.ints(0, 0, 1, 0, 0, -1))


def padded_by_axes(b: Block, v: ir.Value) -> ir.Value:
    return b.op("Pad", v, b.ints(1, 0), None, b.ints(-2))


def expanded_along_the_last(b: Block, v: ir.Value) -> ir.Value:
    """A column of the inner axis by a row of as many: the sizes that are given are those of the last axis alone."""
    square = b.op("Expand", b.op("Unsqueeze", v, b.ints(3)), b.ints(INNER))
    return b.op("ReduceMax", square, axes=[3], keepdims=0)


def resized_along(*axes: int) -> Middle:
    """The places of an image, to twice as many, by sizes of these axes alone."""

    def middle(b: Block, image: ir.Value) -> ir.Value:
        square = b.op("Unsqueeze", image, b.ints(3))
        larger = b.op("Resize", square, None, None, b.ints(*[10] * len(axes)), axes=axes, mode="nearest")
        return b.op("ReduceMax", larger, b.ints(3), keepdims=0)

    return middle


def padded_to_a_multiple(b: Block, v: ir.Value) -> ir.Value:
    """Padding to whole windows, by an amount that depends on the number of positions."""
    eight, zero = b.ints(8), b.ints(0)
    lacking = b.op("Mod", b.op("Sub", eight, b.op("Mod", b.shape(v, 1), eight)), eight)
    padded = b.op("Pad", v, b.op("Concat", zero, zero, zero, zero, lacking, zero, axis=0))
    windows = b.op("Reshape", padded, b.op("Concat", b.shape(v, 0), b.ints(-1, 8, INNER), axis=0))
    return b.op("ReduceMax", windows, axes=[2], keepdims=0)


def padded_to_rows(b: Block, v: ir.Value) -> ir.Value:
    """To as many places as are then taken one by one: a chunk of linear attention."""
    zero, count = b.ints(0), 9
    lacking = b.op("Sub", b.ints(count), b.shape(v, 1))
    padded = b.op("Pad", v, b.op("Concat", zero, zero, zero, zero, lacking, zero, axis=0))
    return b.op("Sum", *b.ops("Split", padded, b.ints(*[1] * count), outputs=count, axis=1))


def padded_along(b: Block, v: ir.Value) -> ir.Value:
    return b.op("Slice", b.op("Pad", v, b.ints(0, 0, 1, 0, 0, 0)), b.ints(0), b.ints(INNER), b.ints(2))


def resized(b: Block, image: ir.Value) -> ir.Value:
    """To twice as many places, by sizes of all axes."""
    sizes = b.op("Concat", b.shape(image, 0), b.ints(INNER, 10), axis=0)
    return b.op("Resize", image, None, None, sizes, mode="nearest")


def stretched(kind: str) -> Middle:
    """Doubles the last axis by scales, and takes every other element."""

    def middle(b: Block, v: ir.Value) -> ir.Value:
        scales = b.constant([1, 1, 2], np.float32)
        more = (scales,) if kind == "Upsample" else (None, scales)
        return b.op("MaxPool", b.op(kind, v, *more), kernel_shape=[2], strides=[2])

    return middle


def of_channels(middle: Middle) -> Middle:
    return lambda b, v: as_image(b, v, middle)


def count_as_number(b: Block, v: ir.Value) -> ir.Value:
    """The number of elements of the split value must be the whole value's."""
    return b.op("Div", v, b.op("Sqrt", as_float(b, b.op("Size", v))))


GRAPHS: dict[str, Tiny] = {
    "Reshape": sandwich(to_heads_and_back, shares=SHARES),
    "Flatten": sandwich(flattened, shares=SHARES),
    "Squeeze": sandwich(squeezed, shares=SHARES),
    "Unsqueeze": sandwich(lambda b, v: b.op("Reshape", b.op("Unsqueeze", v, b.ints(1, 4)), b.op("Shape", v))),
    "Transpose": sandwich(lambda b, v: b.op("Transpose", b.op("Tanh", b.op("Transpose", v)), perm=[2, 1, 0])),
    "Expand": sandwich(expanded, narrow=2 * INNER, shares=SHARES),
    "Tile": sandwich(tiled, narrow=2 * INNER, shares=SHARES),
    "ConstantOfShape": sandwich(filled),
    "Concat": sandwich(concatenated, narrow=2 * INNER, shares=SHARES),
    "Split": sandwich(gate, wide=2 * INNER, shares=SHARES),
    "Slice": sandwich(gate_by_slices, wide=2 * INNER, shares=SHARES),
    "Pad": sandwich(padded_elsewhere, needs=padded_along, shares=SHARES),
    "Resize": sandwich(of_channels(resized), needs=stretched("Resize")),
    "Upsample": sandwich(of_channels(stretched("Upsample")), needs=stretched("Upsample"), opset=9),
    "Shape": sandwich(size_as_number, shares=SHARES),
    "Size": sandwich(count_as_number),
}
FORMS: dict[str, Tiny] = {
    "gate, num_outputs": sandwich(
        lambda b, v: b.op("Mul", *b.ops("Split", v, outputs=2, axis=2, num_outputs=2)),
        wide=2 * INNER,
        opset=20,
        shares=SHARES,
    ),
    "sections of other sizes": sandwich(uneven_sections, wide=INNER + 8, sums=2, shares=SHARES),
    "halves along other axes": sandwich(halves_along_other_axes, wide=2 * INNER, narrow=2 * INNER, shares=SHARES),
    "negative slices": sandwich(negative_slices, wide=2 * INNER, shares=SHARES),
    "negative slices behind a whole part": Tiny(
        sandwich(negative_slices_behind_a_whole_part, wide=INNER + 8).build, "B", shares=SHARES
    ),
    "strided slices": sandwich(strided, wide=2 * INNER, shares=SHARES),
    "slices of computed sizes": sandwich(
        lambda b, v: b.op("Slice", v, b.ints(0, 0, 0), b.op("Shape", b.op("Tanh", v))), shares=SHARES
    ),
    "slices from a computed size": sandwich(behind_the_text, shares=SHARES),
    "batch and heads": sandwich(merged_with_batch, shares=SHARES),
    "expand to the sizes of another": sandwich(expanded_from_one, split={"row"}),
    "pad of one axis": sandwich(padded_by_axes, opset=18),
    "pad to a multiple": sandwich(padded_to_a_multiple),
    "pad to rows": sandwich(padded_to_rows),
    "pad to the same size": sandwich(padded_elsewhere, needs=padded_and_cut),
    "expand by fewer sizes": sandwich(lambda b, v: b.op("Relu", b.op("Expand", v, b.ints(1)))),
    "expand of a column": sandwich(expanded_along_the_last),
    "resize of one axis": sandwich(of_channels(resized_along(2)), opset=19),
    "resize of two axes": sandwich(of_channels(resized_along(-2, -1)), opset=19),
    "resize by scales": sandwich(of_channels(stretched("Resize"))),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_operator_is_sharded(name: str, tmp_path: Path) -> None:
    check_operator(GRAPHS, name, tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_other_form_is_sharded(form: str, tmp_path: Path) -> None:
    FORMS[form].check(tmp_path)


def test_a_slice_whose_end_is_not_known_is_tried_with_one_that_leaves_what_its_result_has() -> None:
    """As exporters write relative positions. If it took its axis whole, its shape rule would seem wrong."""
    values = [ir.Value(name=name) for name in ("data", "starts", "ends", "axes")]
    inputs = [tuple(map(new_axis, sizes)) for sizes in ((4, 23), (1,), (1,), (1,))]
    operation = Operation(
        ir.node("Slice", values), inputs, [tuple(map(new_axis, (4, 12)))], [None] * 3 + [np.array([-1])]
    )
    assert slice_bounds(operation, 2) == [12]
    starting_at_three = replace(operation, constants=[None, np.array([3]), None, np.array([-1])])
    assert slice_bounds(starting_at_three, 2) == [15]
    assert slice_bounds(replace(operation, outputs=[None]), 2) == WHOLE
