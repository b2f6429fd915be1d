"""Each rule: a tiny graph that needs it, split 2, 3 and 4 ways and unevenly, equals the whole.

Most are an operator in the middle of x A -> operator -> B, where the inner axis is to be split.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.helpers.blocks import FLOAT, Block, check_split, sharded

Middle = Callable[[Block, ir.Value], ir.Value]
INNER = 24


def sandwich(middle: Middle, *, wide: int = INNER, narrow: int = INNER, opset: int = 17) -> Block:
    """x [n, 5, 12] A [12, wide] -> middle -> B [narrow, 12], with norms at both ends that need those axes whole."""
    b = Block(opset)
    x = b.op("Softmax", b.data("x", (2, 5, 12), ["n", "t", 12]))
    b.give(b.op("Softmax", b.op("MatMul", middle(b, b.op("MatMul", x, b.w("A", 12, wide))), b.w("B", narrow, 12))))
    return b


def through(kind: str, **attributes: object) -> Middle:
    return lambda b, v: b.op(kind, v, **attributes)


def cast(b: Block, v: ir.Value) -> ir.Value:
    return b.op("Cast", b.op("Cast", v, to=ir.DataType.DOUBLE), to=FLOAT)


def gate(b: Block, v: ir.Value) -> ir.Value:
    first, second = b.ops("Split", v, outputs=2, axis=-1)
    return b.op("Mul", b.op("Sigmoid", first), second)


def uneven_sections(b: Block, v: ir.Value) -> ir.Value:
    first, second = b.ops("Split", v, b.ints(INNER, 8), outputs=2, axis=-1)
    return b.op("Mul", first, b.op("ReduceMean", b.op("MatMul", second, b.w("C", 8, 12)), axes=[-1]))


def gate_by_slices(b: Block, v: ir.Value) -> ir.Value:
    first = b.op("Slice", v, b.ints(0), b.ints(INNER), b.ints(2))
    second = b.op("Slice", v, b.ints(INNER), b.ints(2**63 - 1), b.ints(2), b.ints(1))
    return b.op("Mul", b.op("Tanh", first), second)


def negative_slices(b: Block, v: ir.Value) -> ir.Value:
    first = b.op("Slice", v, b.ints(-2 * INNER), b.ints(-INNER), b.ints(-1))
    second = b.op("Slice", v, b.ints(-INNER), b.ints(2 * INNER), b.ints(-1))
    return b.op("Mul", first, second)


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
    """A size of the split value that is used as a number must be that of the whole."""
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


def picked_rows(b: Block, v: ir.Value) -> ir.Value:
    return b.op("Gather", v, b.ints(4, 1, 0), axis=1)


def picked_by_element(b: Block, v: ir.Value) -> ir.Value:
    return b.op("GatherND", v, b.constant([[0], [1], [1]], np.int64))


def scattered_rows(b: Block, v: ir.Value) -> ir.Value:
    zeros = b.op("ConstantOfShape", b.op("Shape", v), value=ir.tensor([0.0]))
    updates = b.op("Gather", v, b.ints(1, 0), axis=0)
    return b.op("ScatterND", zeros, b.constant([[0], [1]], np.int64), updates)


def scattered_by_element(b: Block, v: ir.Value) -> ir.Value:
    places = b.op("Expand", b.constant([[[2]]], np.int64), b.op("Concat", b.shape(v, 0), b.ints(1, INNER), axis=0))
    first = b.op("Slice", v, b.ints(0), b.ints(1), b.ints(1))
    return b.op("ScatterElements", v, places, first, axis=1)


def summed_elsewhere(b: Block, v: ir.Value) -> ir.Value:
    return b.op("Mul", v, b.op("ReduceSum", v, b.ints(1), keepdims=1))


def averaged_elsewhere(b: Block, v: ir.Value) -> ir.Value:
    return b.op("Sub", v, b.op("ReduceMean", v, axes=[1]))


def largest_elsewhere(b: Block, v: ir.Value) -> ir.Value:
    return b.op("Sub", v, b.op("ReduceMax", v, axes=[1], keepdims=1))


def where(b: Block, v: ir.Value) -> ir.Value:
    return b.op("Where", b.op("Greater", v, b.constant(0, np.float32)), v, b.op("Mul", v, b.w("slope", INNER)))


def norm_elsewhere(b: Block, v: ir.Value) -> ir.Value:
    heads = b.op("Reshape", v, b.ints(0, 0, 8, 3))
    return b.op("Reshape", b.op("LayerNormalization", heads, b.w("scale", 3), axis=-1), b.ints(0, 0, INNER))


def padded_elsewhere(b: Block, v: ir.Value) -> ir.Value:
    return b.op("Pad", v, b.ints(0, 1, 0, 0, 0, 0))


def running_sum_elsewhere(b: Block, v: ir.Value) -> ir.Value:
    return b.op("CumSum", v, b.constant(1, np.int64))


def largest_two_elsewhere(b: Block, v: ir.Value) -> ir.Value:
    return b.ops("TopK", v, b.ints(2), outputs=2, axis=1)[0]


def quantized_activation(b: Block, v: ir.Value) -> ir.Value:
    scale, zero = b.constant(0.05, np.float32), b.constant(3, np.int8)
    return b.op("DequantizeLinear", b.op("QuantizeLinear", v, scale, zero), scale, zero)


def channels(b: Block, v: ir.Value) -> ir.Value:
    """Through [n, channels, places] and back."""
    image = b.op("Transpose", v, perm=[0, 2, 1])
    normed = b.op(
        "BatchNormalization",
        image,
        *(b.w(n, INNER) for n in ("s", "b", "m")),
        b.weight("v", ir.tensor(np.ones(INNER, np.float32))),
    )
    own = b.op("Conv", normed, b.w("depthwise", INNER, 1, 3), b.w("bias", INNER), group=INNER, pads=[1, 1])
    pooled = b.op("MaxPool", b.op("InstanceNormalization", own, b.w("s2", INNER), b.w("b2", INNER)), kernel_shape=[1])
    return b.op("Transpose", pooled, perm=[0, 2, 1])


MIDDLES: dict[str, Block] = {
    "nonlinear": sandwich(through("Gelu"), opset=20),
    "contrib gelu": sandwich(through("com.microsoft.FastGelu")),
    "clip": sandwich(lambda b, v: b.op("Clip", v, b.constant(-1, np.float32), b.constant(1, np.float32))),
    "power": sandwich(lambda b, v: b.op("Pow", v, b.constant(2, np.float32))),
    "bias": sandwich(lambda b, v: b.op("Relu", b.op("Add", b.w("bias", INNER), v))),
    "cast": sandwich(cast),
    "where": sandwich(where),
    "gate": sandwich(gate, wide=2 * INNER),
    "gate, num_outputs": sandwich(
        lambda b, v: b.op("Mul", *b.ops("Split", v, outputs=2, axis=2, num_outputs=2)), wide=2 * INNER, opset=20
    ),
    "sections of other sizes": sandwich(uneven_sections, wide=INNER + 8),
    "slices": sandwich(gate_by_slices, wide=2 * INNER),
    "negative slices": sandwich(negative_slices, wide=2 * INNER),
    "strided slices": sandwich(strided, wide=2 * INNER),
    "heads": sandwich(to_heads_and_back),
    "batch and heads": sandwich(merged_with_batch),
    "size as a number": sandwich(size_as_number),
    "expand": sandwich(expanded, narrow=2 * INNER),
    "tile": sandwich(tiled, narrow=2 * INNER),
    "squeeze": sandwich(squeezed),
    "flatten": sandwich(flattened),
    "concat": sandwich(concatenated, narrow=2 * INNER),
    "gather": sandwich(picked_rows),
    "gather nd": sandwich(picked_by_element),
    "scatter nd": sandwich(scattered_rows),
    "scatter elements": sandwich(scattered_by_element),
    "reduce sum": sandwich(summed_elsewhere),
    "reduce mean": sandwich(averaged_elsewhere),
    "reduce max": sandwich(largest_elsewhere),
    "norm": sandwich(norm_elsewhere),
    "pad": sandwich(padded_elsewhere),
    "cumsum": sandwich(running_sum_elsewhere),
    "topk": sandwich(largest_two_elsewhere),
    "quantized activation": sandwich(quantized_activation),
    "channels": sandwich(channels),
}


@pytest.mark.parametrize("name", MIDDLES)
def test_operator_in_the_middle(name: str, tmp_path: Path) -> None:
    check_split(MIDDLES[name], tmp_path, {"A", "B"}, sums=2 if name == "sections of other sizes" else 1)


def test_unit_that_a_rank_lacks_is_a_copy_that_does_not_count(tmp_path: Path) -> None:
    """An axis of two on four ranks: two of them run with a copy of another's unit, and add nothing to the sum."""
    (plan,) = check_split(sandwich(through("Relu"), wide=2, narrow=2), tmp_path, {"A", "B"}, [(1, 1, 1, 1)], sums=1)
    (ranges,) = sharded(plan).ranges.values()
    assert [each.counts for each in ranges].count(True) == 2


def test_einsum(tmp_path: Path) -> None:
    b = Block()
    x = b.op("Softmax", b.data("x", (2, 5, 12), ["n", "t", 12]))
    heads = b.op("Reshape", b.op("MatMul", x, b.w("A", 12, INNER)), b.ints(0, 0, 4, 6))
    joined = b.op("Einsum", b.op("Einsum", heads, equation="nthd->nhtd"), b.w("E", 4, 6, 12), equation="nhtd,hdf->ntf")
    b.give(b.op("Softmax", joined))
    check_split(b, tmp_path, {"A", "E"}, sums=1)


def test_gemm_in_all_its_forms(tmp_path: Path) -> None:
    b = Block()
    x = b.op("Softmax", b.data("x", (5, 12), ["t", 12]))
    inner = b.op("Gemm", x, b.w("A", INNER, 12), b.w("a", INNER), transB=1, alpha=0.5, beta=2.0)
    turned = b.op("Transpose", b.op("Relu", inner), perm=[1, 0])
    b.give(b.op("Gemm", turned, b.w("B", INNER, 12), b.w("b", 12), transA=1, beta=0.5), shape=["t", 12])
    check_split(b, tmp_path, {"A", "a", "B"}, whole={"b"}, sums=1)


def test_weight_on_the_left_transposed_or_batched(tmp_path: Path) -> None:
    b = Block()
    x = b.op("Softmax", b.data("x", (2, 12, 5), ["n", 12, "t"]), axis=1)
    inner = b.op("MatMul", b.w("A", INNER, 12), x)
    batched = b.op("MatMul", b.op("Transpose", inner, perm=[0, 2, 1]), b.w("B", 1, INNER, 12))
    last = b.op("MatMul", b.op("Softmax", batched), b.op("Transpose", b.w("C", INNER, 12), perm=[1, 0]))
    b.give(b.op("MatMul", b.op("Relu", last), b.w("D", INNER, 12)))
    check_split(b, tmp_path, {"A", "B", "C", "D"}, sums=2)


def test_bias_of_a_sum_is_added_once(tmp_path: Path) -> None:
    b = Block()
    x = b.op("Softmax", b.data("x", (2, 5, 12), ["n", "t", 12]))
    product = b.op("MatMul", b.op("Relu", b.op("MatMul", x, b.w("A", 12, INNER))), b.w("B", INNER, 12))
    b.give(b.op("Add", x, b.op("Sub", b.w("bias", 12), product)))
    check_split(b, tmp_path, {"A", "B"}, whole={"bias"}, sums=1)


def test_partial_values_meet_before_they_are_summed(tmp_path: Path) -> None:
    """As in blocks whose attention and feed-forward part run side by side: one sum for both and the residual."""
    b = Block()
    x = b.data("x", (2, 5, 12), ["n", "t", 12])
    both = [
        b.op("MatMul", b.op("Relu", b.op("MatMul", x, b.w(f"A{i}", 12, INNER))), b.w(f"B{i}", INNER, 12))
        for i in (0, 1)
    ]
    b.give(b.op("Add", b.op("Add", x, both[0]), both[1]))
    check_split(b, tmp_path, {"A0", "B0", "A1", "B1"}, sums=1)


def test_head_alone_is_split_and_its_result_joined(tmp_path: Path) -> None:
    b = Block()
    ids = b.indices("ids", [[0, 29], [7, 15]], ["n", "t"])
    hidden = b.op("Softmax", b.op("Gather", b.w("table", 30, 12), ids, axis=0))
    b.give(b.op("MatMul", hidden, b.w("head", 12, 30)), shape=["n", "t", 30])
    check_split(b, tmp_path, {"head"}, whole={"table"}, sums=0)


@pytest.mark.parametrize("zeros", [False, True])
def test_weights_in_blocks_of_few_bits(zeros: bool, tmp_path: Path) -> None:
    """MatMulNBits: whole blocks of 16, and pairs of blocks where zero points share a byte."""
    b = Block()

    def product(x: ir.Value, name: str, size: int, columns: int) -> ir.Value:
        generator = np.random.default_rng(len(name))
        packed = generator.integers(0, 255, (columns, size // 16, 8), dtype=np.uint8)
        inputs = [b.weight(name, ir.tensor(packed)), b.w(f"{name}.scales", columns * size // 16)]
        if zeros:
            inputs.append(
                b.weight(f"{name}.zeros", ir.tensor(generator.integers(0, 255, columns * size // 32, dtype=np.uint8)))
            )
        return b.op("com.microsoft.MatMulNBits", x, *inputs, K=size, N=columns, bits=4, block_size=16)

    x = b.op("Softmax", b.data("x", (2, 5, 32), ["n", "t", 32]))
    b.give(product(b.op("Relu", product(x, "A", 32, 128)), "B", 128, 32))
    check_split(b, tmp_path, {"A", "A.scales", "B", "B.scales"}, sums=1)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_that_do_not_divide_what_they_are_of(bits: int, zeros: bool, flat: bool, tmp_path: Path) -> None:
    """The last block is filled up: the columns can be split all the same, with their scales and zero points."""
    b = Block()
    size, columns, blocks = 40, 64, 3
    generator = np.random.default_rng(bits)

    def stored(name: str, *shape: int) -> ir.Value:
        return b.weight(name, ir.tensor(generator.integers(0, 255, shape, dtype=np.uint8)))

    bytes_ = math.ceil(blocks * bits / 8)
    inputs = [stored("A", columns, blocks, 16 * bits // 8)]
    inputs.append(b.w("A.scales", columns * blocks) if flat else b.w("A.scales", columns, blocks))
    if zeros:
        inputs.append(stored("A.zeros", columns * bytes_) if flat else stored("A.zeros", columns, bytes_))
    x = b.op("Softmax", b.data("x", (2, 5, size), ["n", "t", size]))
    y = b.op("com.microsoft.MatMulNBits", x, *inputs, K=size, N=columns, bits=bits, block_size=16)
    b.give(b.op("MatMul", b.op("Relu", y), b.w("B", columns, 32)))
    check_split(b, tmp_path, {"A", "A.scales", "B"} | ({"A.zeros"} if zeros else set()), sums=1)


def test_quantized_weights_with_scales_by_column_and_block(tmp_path: Path) -> None:
    b = Block(opset=21)
    x = b.op("Softmax", b.data("x", (2, 5, 12), ["n", "t", 12]))
    generator = np.random.default_rng(0)

    def stored(name: str, *shape: int) -> ir.Value:
        return b.weight(name, ir.tensor(generator.integers(-100, 100, shape, dtype=np.int8)))

    by_column = b.op("DequantizeLinear", stored("A", 12, INNER), b.w("a", INNER), axis=1)
    by_block = b.op("DequantizeLinear", stored("B", INNER, 12), b.w("b", 6, 12), axis=0, block_size=4)
    b.give(b.op("MatMul", b.op("Relu", b.op("MatMul", x, by_column)), by_block))
    check_split(b, tmp_path, {"A", "a", "B", "b"}, sums=1)


def test_integer_product_with_a_fixed_scale(tmp_path: Path) -> None:
    b = Block()
    x = b.op("Softmax", b.data("x", (2, 5, 12), ["n", "t", 12]))
    generator = np.random.default_rng(0)

    def product(v: ir.Value, name: str, *shape: int) -> ir.Value:
        zero = b.constant(128, np.uint8)
        quantized = b.op("QuantizeLinear", v, b.constant(0.05, np.float32), zero)
        weight = b.weight(name, ir.tensor(generator.integers(-100, 100, shape, dtype=np.int8)))
        zeros = b.weight(f"{name}.zeros", ir.tensor(generator.integers(-9, 9, shape[-1:], dtype=np.int8)))
        whole = b.op("MatMulInteger", quantized, weight, zero, zeros)
        return b.op("Mul", b.op("Cast", whole, to=FLOAT), b.constant(0.001, np.float32))

    b.give(product(b.op("Relu", product(x, "A", 12, INNER)), "B", INNER, 12))
    check_split(b, tmp_path, {"A", "B"}, sums=1)


@pytest.mark.parametrize("inner", [INNER, 2])
def test_integer_product_with_a_scale_found_at_run_time(inner: int, tmp_path: Path) -> None:
    """What ONNX Runtime's quantize_dynamic writes: the ranks find the scale of the whole together."""
    b = Block()
    x = b.op("Softmax", b.data("x", (2, 5, 12), ["n", "t", 12]))
    generator = np.random.default_rng(0)

    def product(v: ir.Value, name: str, *shape: int) -> ir.Value:
        quantized, scale, zero = b.ops("DynamicQuantizeLinear", v, outputs=3)
        weight = b.weight(name, ir.tensor(generator.integers(-100, 100, shape, dtype=np.int8)))
        whole = b.op("Cast", b.op("MatMulInteger", quantized, weight, zero, b.constant(0, np.int8)), to=FLOAT)
        return b.op("Mul", whole, b.op("Mul", scale, b.w(f"{name}.scale", 1)))

    hidden = b.op("Relu", b.op("Add", product(x, "A", 12, inner), b.w("bias", inner)))
    b.give(b.op("Add", x, product(hidden, "B", inner, 12)))
    plans = check_split(b, tmp_path, {"A", "bias", "B"}, sums=1)
    assert all(sharded(plan).choice.sums.count == 2 for plan in plans)


def test_convolutions(tmp_path: Path) -> None:
    b = Block()
    x = b.op("Softmax", b.data("x", (2, 6, 8, 8), ["n", 6, "h", "w"]), axis=1)
    wide = b.op("Relu", b.op("Conv", x, b.w("A", INNER, 6, 3, 3), b.w("a", INNER), pads=[1] * 4))
    grouped = b.op("Conv", wide, b.w("G", INNER, 3, 3, 3), group=8, pads=[1] * 4)
    back = b.op("Conv", b.op("Sigmoid", grouped), b.w("B", 6, INNER, 1, 1), b.w("b", 6))
    up = b.op(
        "ConvTranspose",
        b.op("Relu", b.op("Conv", b.op("Softmax", b.op("Add", x, back), axis=1), b.w("C", INNER, 6, 1, 1))),
        b.w("D", INNER, 6, 2, 2),
        b.w("d", 6),
        strides=[2, 2],
    )
    b.give(up, shape=["n", 6, "h2", "w2"])
    check_split(b, tmp_path, {"A", "a", "G", "B", "C", "D"}, sums=2)


def test_group_norm_splits_by_groups(tmp_path: Path) -> None:
    b = Block(opset=21)
    x = b.op("Softmax", b.data("x", (2, 6, 8), ["n", 6, "t"]), axis=1)
    wide = b.op("Conv", x, b.w("A", INNER, 6, 1))
    normed = b.op("GroupNormalization", wide, b.w("s", INNER), b.w("o", INNER), num_groups=8)
    b.give(b.op("Conv", b.op("Relu", normed), b.w("B", 6, INNER, 1)), shape=["n", 6, "t"])
    check_split(b, tmp_path, {"A", "B"}, sums=1)


def test_experts_as_batched_products(tmp_path: Path) -> None:
    """Each expert is sliced; what says how much each counts is whole."""
    b = Block()
    x = b.data("x", (2, 5, 12), ["n", "t", 12])
    chances = b.op("Softmax", b.op("MatMul", x, b.w("router", 12, 3)), axis=-1)
    inner = b.op("Relu", b.op("MatMul", b.op("Unsqueeze", x, b.ints(1)), b.w("up", 3, 12, INNER)))
    outer = b.op("MatMul", inner, b.w("down", 3, INNER, 12))
    by_expert = b.op("Unsqueeze", b.op("Transpose", chances, perm=[0, 2, 1]), b.ints(3))
    b.give(b.op("Add", x, b.op("ReduceSum", b.op("Mul", outer, by_expert), b.ints(1), keepdims=0)))
    (plan, *_) = check_split(b, tmp_path, {"up", "down"}, whole={"router"}, sums=1)
    (value,) = sharded(plan).choice.sums.summed
    producer = value.producer()
    assert producer is not None
    assert producer.op_type == "ReduceSum", "the sum is after the experts are added up, where it is smallest"


def test_weight_that_only_control_flow_reads_is_whole(tmp_path: Path) -> None:
    b = Block()
    x = b.data("x", (2, 5, 12), ["n", "t", 12])
    weight = b.w("A", 12, 12)
    inner = ir.node("MatMul", [x, weight])
    inner.outputs[0].name = "inner"
    branch = ir.Graph([], inner.outputs, nodes=[inner], name="branch")
    other = ir.node("Identity", [x])
    other.outputs[0].name = "other"
    condition = b.op("Greater", b.op("ReduceSum", x, keepdims=0), b.constant(0, np.float32))
    chosen = b.op(
        "If", condition, then_branch=branch, else_branch=ir.Graph([], other.outputs, nodes=[other], name="same")
    )
    b.give(
        b.op("MatMul", b.op("Relu", b.op("MatMul", b.op("Softmax", chosen), b.w("B", 12, INNER))), b.w("C", INNER, 12))
    )
    check_split(b, tmp_path, {"B", "C"}, sums=1)
