"""Operators along an axis need it whole, and leave other axes shardable; sums contract theirs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.operation import Operation
from splitc.compiler.operators.registry import relate_axes
from tests.helpers.blocks import SHARES, Block, check_split
from tests.helpers.operators import (
    HIDDEN,
    INNER,
    PLACES,
    TWO,
    Middle,
    Tiny,
    as_float,
    as_image,
    by_heads,
    check_operator,
    number,
    of_integers,
    sandwich,
    softmax,
    through,
)


class HalfBlock(Block):
    """A block whose weights are in half precision."""

    def w(self, name: str, *shape: int) -> ir.Value:
        return self.weight(name, ir.tensor(self.random(name, *shape).astype(np.float16)))


REDUCTIONS = "ReduceL1 ReduceLogSum ReduceLogSumExp ReduceProd ReduceSumSquare"
EXTREMES = "ReduceMax ReduceMin"
POOLS = {"AveragePool": {"kernel_shape": [3]}, "LpPool": {"kernel_shape": [3]}, "MaxPool": {"kernel_shape": [3]}}


def reduced(kind: str, axis: int) -> Middle:
    """What is reduced along an axis, from each element."""

    def middle(b: Block, v: ir.Value) -> ir.Value:
        return b.op("Sub", v, b.op(kind, b.op("Sigmoid", v), axes=[axis], keepdims=1))

    return middle


def unit_length(b: Block, v: ir.Value) -> ir.Value:
    """Divided by the length of the inner axis, as video autoencoders normalize channels."""
    return b.op("Div", v, b.op("Max", b.op("ReduceL2", v, axes=[2], keepdims=1), number(b, 1e-9)))


def unit_length_of_two_parts(b: Block, v: ir.Value) -> ir.Value:
    """Of which a rank may have elements of one alone."""
    first, second = b.ops("Split", v, b.ints(INNER, 8), outputs=2, axis=2)
    return unit_length(b, b.op("Concat", b.op("Tanh", first), b.op("Sigmoid", second), axis=2))


def local_norm(b: Block, v: ir.Value, last: int) -> ir.Value:
    """With the places, or the inner axis, as channels: the axis of size 1 that images have beside is the `last`."""
    order = [0, 1, 2] if last == 3 else [0, 2, 1]
    image = b.op("Unsqueeze", b.op("Transpose", v, perm=order), b.ints(3))
    return b.op("Transpose", b.op("Squeeze", b.op("LRN", image, size=3, alpha=0.5), b.ints(3)), perm=order)


def summed(axis: int) -> Middle:
    return lambda b, v: b.op("Mul", v, b.op("ReduceSum", v, b.ints(axis), keepdims=1))


def averaged_elsewhere(b: Block, v: ir.Value) -> ir.Value:
    return b.op("Sub", v, b.op("ReduceMean", v, axes=[1]))


def best(kind: str, axis: int) -> Middle:
    """The index of an extreme."""
    return lambda b, v: b.op("Mul", v, as_float(b, b.op(kind, v, axis=axis, keepdims=1)))


def along(kind: str, axis: int) -> Middle:
    return lambda b, v: b.op(kind, v, axis=axis)


def running_sum(axis: int) -> Middle:
    return lambda b, v: b.op("CumSum", v, b.constant(axis, np.int64))


def largest(count: int, axis: int) -> Middle:
    return lambda b, v: b.ops("TopK", v, b.ints(count), outputs=2, axis=axis)[0]


def normed(kind: str, *weights: str, heads: bool = True) -> Middle:
    """A norm of each head's three numbers, or of all."""

    def middle(b: Block, v: ir.Value) -> ir.Value:
        return b.op(kind, v, *(b.w(f"{name}, {heads}", 3 if heads else INNER) for name in weights))

    return (lambda b, v: by_heads(b, v, middle)) if heads else middle


def of_each_head(kind: str, *weights: str) -> Middle:
    """A norm of each head's three numbers, with weights of its own for each head."""

    def middle(b: Block, v: ir.Value) -> ir.Value:
        return b.op(kind, v, *(b.w(name, 8, 3) for name in weights), axis=-1)

    return lambda b, v: by_heads(b, v, middle)


def skipped(kind: str, *weights: str, heads: bool = True) -> Middle:
    """As `normed`, of the sum with another value. It takes at most three axes: heads are merged with positions."""

    def middle(b: Block, v: ir.Value) -> ir.Value:
        apart = b.op("Reshape", v, b.ints(0, -1, 3)) if heads else v
        made = b.op(kind, apart, b.op("Tanh", apart), *(b.w(f"{n}, {heads}", 3 if heads else INNER) for n in weights))
        return b.op("Reshape", made, b.op("Shape", v)) if heads else made

    return middle


def norm_of_a_sum(b: Block, image: ir.Value) -> ir.Value:
    skip, scale = b.w("skip", INNER, PLACES), b.w("scale", PLACES)
    return b.op("com.microsoft.SkipLayerNormalization", image, skip, scale)


def norms(kind: str, *weights: str, opset: int = 17, shares: Sequence[Sequence[float]] = TWO) -> Tiny:
    """A norm of heads, which leaves them shardable, and one of all."""
    make = skipped if "Skip" in kind else normed
    return sandwich(make(kind, *weights), needs=make(kind, *weights, heads=False), opset=opset, shares=shares)


def shared_norms(kind: str, *weights: str, opset: int = 17) -> Tiny:
    """A norm of heads, which leaves them shardable, and one of all, for which ranks sum squares and elements."""
    split = {"C", "D", *(f"{name}, False" for name in weights)}
    needs = normed(kind, *weights, heads=False)
    return sandwich(normed(kind, *weights), needs=needs, opset=opset, split=split, whole=(), sums=2, shares=SHARES)


def norms_of_queries_and_keys(b: Block, v: ir.Value) -> ir.Value:
    """Two norms along all heads, whose sums are added up in one collective."""
    query, key = (
        b.op("LayerNormalization", b.op("MatMul", v, b.w(name, INNER, INNER)), b.w(f"scale{name}", INNER))
        for name in ("Q", "K")
    )
    return b.op("MatMul", b.op("Mul", query, key), b.w("O", INNER, INNER))


def responses_normed(b: Block, image: ir.Value) -> ir.Value:
    """Scale each channel by its norm over all places, relative to the mean of the channels' norms."""
    norms = b.op("Sqrt", b.op("ReduceSumSquare", image, axes=[2]))
    relative = b.op("Div", norms, b.op("ReduceMean", norms, axes=[1]))
    return b.op("Add", image, b.op("Mul", b.op("Mul", image, relative), b.w("gain", INNER, 1)))


def residual_normed(b: Block, v: ir.Value) -> ir.Value:
    """The norm's input has other readers, or is the sum of two computed values."""
    one, other = (b.op("RMSNormalization", v, b.w(name, INNER)) for name in ("s1", "s2"))
    return b.op("RMSNormalization", b.op("Add", one, other), b.w("s3", INNER))


def norm_written_out(b: Block, v: ir.Value) -> ir.Value:
    """As of models that were quantized before it became one operator."""
    centered = b.op("Sub", v, b.op("ReduceMean", v, axes=[2]))
    variance = b.op("ReduceMean", b.op("Pow", centered, number(b, 2)), axes=[2])
    return b.op("Mul", b.op("Div", centered, b.op("Sqrt", b.op("Add", variance, number(b, 1e-5)))), b.w("scale", INNER))


def norm_of_residual_written_out(b: Block, v: ir.Value) -> ir.Value:
    return b.op("Add", v, norm_written_out(b, b.op("Add", v, b.op("Tanh", v))))


def normed_as_doubles(b: Block, v: ir.Value) -> ir.Value:
    """Ranks' sums of squares are in single precision."""
    wide = b.op("Cast", v, to=ir.DataType.DOUBLE)
    scale = b.weight("s1", ir.tensor(np.ones(INNER)))
    return b.op("Cast", b.op("RMSNormalization", wide, scale), to=ir.DataType.FLOAT)


def embedded() -> Block:
    """Tables and norm in one operator, replicated; the rest is split."""
    b = Block()
    given = b.indices("ids", [[0, 29], [7, 15]], ["n", "t"]), b.indices("kinds", [[0, 1], [1, 1]], ["n", "t"])
    ids = [b.op("Cast", value, to=ir.DataType.INT32) for value in given]
    tables = b.w("words", 30, HIDDEN), b.w("places", 8, HIDDEN), b.w("segments", 2, HIDDEN)
    x = b.ops(
        "com.microsoft.EmbedLayerNormalization", *ids, *tables, b.w("scale", HIDDEN), b.w("shift", HIDDEN), outputs=2
    )[0]
    inner = b.op("Relu", b.op("MatMul", x, b.w("A", HIDDEN, INNER)))
    b.give(softmax(b, b.op("MatMul", inner, b.w("B", INNER, HIDDEN))))
    return b


def batch_normed(b: Block, image: ir.Value) -> ir.Value:
    variance = b.weight("variance", ir.tensor(np.ones(INNER, np.float32)))
    return b.op("BatchNormalization", image, *(b.w(name, INNER) for name in ("scale", "shift", "mean")), variance)


def batch_trained(b: Block, image: ir.Value, channels: int) -> ir.Value:
    """Normalized by its own statistics, as exporters write standardized weights."""
    numbers = [b.w(f"{name}{channels}", channels) for name in ("scale", "shift", "mean", "variance")]
    return b.ops("BatchNormalization", image, *numbers, outputs=3, training_mode=1)[0]


def channels(b: Block, image: ir.Value) -> ir.Value:
    """Each by itself: a norm, a convolution, a norm, a pool."""
    own = b.op(
        "Conv", batch_normed(b, image), b.w("depthwise", INNER, 1, 3), b.w("bias", INNER), group=INNER, pads=[1, 1]
    )
    return b.op("MaxPool", b.op("InstanceNormalization", own, b.w("s2", INNER), b.w("b2", INNER)), kernel_shape=[1])


def instance_normed(channels: int) -> Middle:
    return lambda b, v: b.op("InstanceNormalization", v, *(b.w(f"{n}{channels}", channels) for n in ("scale", "shift")))


def of_channels(middle: Middle) -> Middle:
    """Of [n, channels, places]: the inner axis are the channels."""
    return lambda b, v: as_image(b, v, middle)


def group_normed(size: int, opset: int) -> Tiny:
    def build() -> Block:
        b = Block(opset)
        x = b.op("Softmax", b.data("x", (2, 6, 8), ["n", 6, "t"]), axis=1)
        wide = b.op("Conv", x, b.w("A", INNER, 6, 1))
        normed = b.op("GroupNormalization", wide, b.w("s", size), b.w("o", size), num_groups=8)
        b.give(b.op("Conv", b.op("Relu", normed), b.w("B", 6, INNER, 1)), shape=["n", 6, "t"])
        return b

    return Tiny(build, sums=1, shares=SHARES)


def pooled(kind: str, **attributes: Any) -> Middle:
    return lambda b, v: b.op(kind, v, **attributes)


def places_of_largest(b: Block, v: ir.Value) -> ir.Value:
    """Counted through the whole value."""
    largest, places = b.ops("MaxPool", v, outputs=2, kernel_shape=[1])
    return b.op("Add", largest, b.op("Mul", as_float(b, places), number(b, 0.01)))


def reduced_along_none(b: Block, v: ir.Value) -> ir.Value:
    return b.op("Tanh", b.op("ReduceSum", v, b.constant(np.zeros(0), np.int64), noop_with_empty_axes=1))


def pooled_to_one(kind: str) -> Middle:
    """All places of a channel in one, from each."""
    return lambda b, v: b.op("Sub", v, b.op(kind, v))


def averaged_image(b: Block, v: ir.Value) -> ir.Value:
    """With two axes of places: of one it would be written as ReduceMean."""
    image = b.op("Unsqueeze", v, b.ints(3))
    return b.op("Squeeze", b.op("Sub", image, b.op("GlobalAveragePool", image)), b.ints(3))


GRAPHS: dict[str, Tiny] = {
    **{name: sandwich(reduced(name, 1), needs=reduced(name, 2)) for name in REDUCTIONS.split()},
    **{
        name: sandwich(reduced(name, 1), needs=reduced(name, 2), whole="", split="CD", sums=2, shares=SHARES)
        for name in EXTREMES.split()
    },
    "ReduceL2": sandwich(
        reduced("ReduceL2", 1), needs=reduced("ReduceL2", 2), whole="", split="CD", sums=2, shares=SHARES
    ),
    "ReduceSum": sandwich(summed(1), needs=summed(2), whole="", split="CD", sums=3, shares=SHARES),
    "ReduceMean": sandwich(
        averaged_elsewhere, needs=reduced("ReduceMean", 2), whole="", split="CD", sums=3, shares=SHARES
    ),
    "GlobalAveragePool": sandwich(of_channels(averaged_image), needs=averaged_image),
    "ArgMax": sandwich(best("ArgMax", 1), needs=best("ArgMax", 2)),
    "ArgMin": sandwich(best("ArgMin", 1), needs=best("ArgMin", 2)),
    **{
        name: sandwich(along(name, 1), needs=along(name, 2))
        for name in ("Softmax", "LogSoftmax", "Hardmax", "LpNormalization")
    },
    "CumSum": sandwich(running_sum(1), needs=running_sum(2), shares=SHARES),
    "TopK": sandwich(largest(2, 1), needs=largest(INNER, 2), shares=SHARES),
    "LayerNormalization": shared_norms("LayerNormalization", "scale"),
    "RMSNormalization": shared_norms("RMSNormalization", "scale", opset=23),
    "SimplifiedLayerNormalization": shared_norms("SimplifiedLayerNormalization", "scale"),
    "com.microsoft.SkipLayerNormalization": norms("com.microsoft.SkipLayerNormalization", "scale", "shift", "bias"),
    "com.microsoft.SkipSimplifiedLayerNormalization": norms("com.microsoft.SkipSimplifiedLayerNormalization", "scale"),
    "com.microsoft.EmbedLayerNormalization": Tiny(embedded, "AB", {"words", "places"}, sums=1),
    "BatchNormalization": sandwich(
        of_channels(lambda b, image: batch_trained(b, batch_normed(b, image), INNER)),
        needs=lambda b, v: batch_trained(b, v, PLACES),
        split={name + own for name in ("scale", "shift", "mean", "variance") for own in ("", str(INNER))},
    ),
    "InstanceNormalization": sandwich(
        of_channels(instance_normed(INNER)), needs=instance_normed(PLACES), split={"scale24", "shift24"}
    ),
    "GroupNormalization": group_normed(INNER, 21),
    "MeanVarianceNormalization": sandwich(
        through("MeanVarianceNormalization", axes=[1]), needs=through("MeanVarianceNormalization", axes=[2])
    ),
    "LRN": sandwich(lambda b, v: local_norm(b, v, 3), needs=lambda b, v: local_norm(b, v, 1)),
    **{
        name: sandwich(of_channels(pooled(name, **how)), needs=pooled(name, **how, pads=[1, 1]), narrow=INNER, opset=18)
        for name, how in POOLS.items()
    },
    **{
        name: sandwich(of_channels(pooled_to_one(name)), needs=pooled_to_one(name))
        for name in ("GlobalMaxPool", "GlobalLpPool")
    },
}
# ONNX Runtime has it in ONNX's domain alone; some exporters write it with its own.
WITHOUT_KERNEL = {"com.microsoft.SimplifiedLayerNormalization"}
FORMS: dict[str, Tiny] = {
    "unit length": sandwich(unit_length, shares=SHARES),
    "unit length of two parts": sandwich(unit_length_of_two_parts, wide=INNER + 8, narrow=INNER + 8, shares=SHARES),
    "channels": sandwich(of_channels(channels), shares=SHARES),
    "softmax before opset 13": sandwich(
        lambda b, v: by_heads(b, v, along("Softmax", 3)), needs=along("Softmax", 1), opset=12
    ),
    **{
        f"{kind} of each head": sandwich(of_each_head(kind, *weights), split=set(weights), opset=opset)
        for kind, weights, opset in (
            ("LayerNormalization", ["scale", "shift"], 17),
            ("RMSNormalization", ["scale"], 23),
        )
    },
    "norm of all with a shift": shared_norms("LayerNormalization", "scale", "shift"),
    "norms of queries and of keys": sandwich(
        through("Relu"),
        needs=norms_of_queries_and_keys,
        split={"Q", "K", "O", "scaleQ", "scaleK"},
        sums=2,
        shares=SHARES,
    ),
    "mean of the channels' norms": sandwich(of_channels(responses_normed), split={"gain"}, sums=2, shares=SHARES),
    "norm of doubles": sandwich(through("Relu"), needs=normed_as_doubles, opset=23),
    "norm, written out": sandwich(
        through("Relu"), needs=norm_written_out, whole="", split={"C", "D", "scale"}, sums=2, shares=SHARES
    ),
    "norm of a residual, written out": sandwich(through("Relu"), needs=norm_of_residual_written_out),
    "norms of a residual": sandwich(through("Relu"), needs=residual_normed, opset=23),
    "norm of all and opset 12": shared_norms("SimplifiedLayerNormalization", "scale", opset=12),
    "something added to each of a batch": sandwich(of_channels(norm_of_a_sum), split={"skip"}),
    "places of maxima": sandwich(through("Relu"), needs=places_of_largest),
    "sum along no axis": sandwich(reduced_along_none),
    "max": sandwich(reduced("ReduceMax", 1), shares=SHARES),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_operator_is_sharded(name: str, tmp_path: Path) -> None:
    check_operator(GRAPHS, name, tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_other_form_is_sharded(form: str, tmp_path: Path) -> None:
    FORMS[form].check(tmp_path)


def test_running_sum_along_an_axis_that_is_not_known(tmp_path: Path) -> None:
    b = Block()
    axis = b.indices("axis", 2, [])
    x = softmax(b, b.data("x", (2, 5, HIDDEN)))
    x = softmax(b, b.op("MatMul", b.op("Relu", b.op("MatMul", x, b.w("A", HIDDEN, INNER))), b.w("B", INNER, HIDDEN)))
    x = b.op("CumSum", b.op("MatMul", x, b.w("C", HIDDEN, INNER)), axis)
    b.give(softmax(b, b.op("MatMul", x, b.w("D", INNER, HIDDEN))))
    check_split(b, tmp_path, "AB", TWO, "CD")


def test_mean_of_partial_integers_is_taken_of_the_sum(tmp_path: Path) -> None:
    b = Block()
    check_split(of_integers(b, lambda v: b.op("ReduceMean", v, axes=[1])), tmp_path, "AB", TWO, sums=1)


@pytest.mark.parametrize("name", WITHOUT_KERNEL)
def test_axes_of_a_norm_that_does_not_run(name: str) -> None:
    """All axes but the last are shardable."""
    data, scale, made = (tuple(map(ax.new_axis, shape)) for shape in ((5, 8, 3), (3,), (5, 8, 3)))
    domain, _, kind = name.rpartition(".")
    node = ir.node(kind, [ir.Value(name="x"), ir.Value(name="scale")], domain=domain)
    relate_axes(Operation(node, [data, scale], [made], [None, None]))
    assert [ax.leaves(axis) for axis in data[:2]] == [ax.leaves(axis) for axis in made[:2]]
    pinned = [atom.pinned is not None for axes in (data, made) for axis in axes for atom in ax.atoms(axis)]
    assert pinned == [False, False, True] * 2


@pytest.mark.parametrize(
    "middle",
    [normed("LayerNormalization", "scale", "shift", heads=False), reduced("ReduceMax", 2), reduced("ReduceMin", 2)],
)
def test_halves_of_shards_are_normalized_and_compared(middle: Middle, tmp_path: Path) -> None:
    b = HalfBlock()
    x = b.op("Cast", softmax(b, b.data("x", (2, 5, HIDDEN), ["n", "t", HIDDEN])), to=ir.DataType.FLOAT16)
    inner = middle(b, b.op("MatMul", x, b.w("A", HIDDEN, INNER)))
    y = b.op("Cast", b.op("MatMul", inner, b.w("B", INNER, HIDDEN)), to=ir.DataType.FLOAT)
    b.give(softmax(b, y))
    check_split(b, tmp_path, {"A", "B"}, SHARES, sums=1, tolerance=2e-3)
