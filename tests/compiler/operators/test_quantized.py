"""Quantized weights and values, and their scales and zero points."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from splitc.compiler import Request, plan_model
from tests.helpers.blocks import SHARES, Block, check_rows, check_split
from tests.helpers.needs import need_experts
from tests.helpers.operators import HIDDEN, INNER, TWO, Middle, Tiny, check_operator, number, sandwich, softmax, stored


def rounded_activation(domain: str = "") -> Middle:
    """Quantized and unpacked, with one scale."""

    def middle(b: Block, v: ir.Value) -> ir.Value:
        scale, zero = number(b, 0.05), b.constant(3, np.int8)
        return b.op(f"{domain}DequantizeLinear", b.op(f"{domain}QuantizeLinear", v, scale, zero), scale, zero)

    return middle


def rounded_by_column(b: Block, v: ir.Value) -> ir.Value:
    scales, zeros = b.op("Exp", b.w("scales", INNER)), stored(b, "zeros", INNER)
    kind = "com.microsoft.{}Linear"
    return b.op(
        kind.format("Dequantize"), b.op(kind.format("Quantize"), v, scales, zeros, axis=2), scales, zeros, axis=2
    )


def few_blocks() -> Block:
    """Two blocks of twelve: several ranks have parts of one block."""
    b = Block(21)
    x = b.op("Softmax", b.data("x", (2, 5, 12), ["n", "t", 12]))
    inner = b.op("Relu", b.op("MatMul", x, b.w("A", 12, INNER)))
    weight = b.op("DequantizeLinear", stored(b, "B", INNER, 12), b.w("b", 2, 12), axis=0, block_size=12)
    b.give(b.op("Softmax", b.op("MatMul", inner, weight)))
    return b


def scales_by_column_and_block() -> Block:
    b = Block(opset=21)
    x = softmax(b, b.data("x", (2, 5, 12), ["n", "t", 12]))
    by_column = b.op("DequantizeLinear", stored(b, "A", 12, INNER), b.w("a", INNER), axis=1)
    by_block = b.op("DequantizeLinear", stored(b, "B", INNER, 12), b.w("b", 6, 12), axis=0, block_size=4)
    b.give(b.op("MatMul", b.op("Relu", b.op("MatMul", x, by_column)), by_block))
    return b


def float8() -> Block:
    """With the zero points of 0 that ONNX Runtime's quantizer writes: others are refused."""
    b = Block(opset=21)

    def unpacked(name: str, *shape: int, axis: int) -> ir.Value:
        kind = ir.DataType.FLOAT8E4M3FN.numpy()
        weight = b.weight(name, ir.tensor(b.random(name, *shape).astype(kind)))
        zeros = b.weight(f"{name}.zeros", ir.tensor(np.zeros(shape[axis], kind)))
        return b.op("DequantizeLinear", weight, b.w(f"{name}.scales", shape[axis]), zeros, axis=axis)

    x = softmax(b, b.data("x", (2, 5, 12), ["n", "t", 12]))
    inner = b.op("Relu", b.op("MatMul", x, unpacked("A", 12, INNER, axis=1)))
    b.give(softmax(b, b.op("MatMul", inner, unpacked("B", INNER, 12, axis=0))))
    return b


def scales_by_column() -> Block:
    """In ONNX Runtime's domain."""
    b = Block()
    x = softmax(b, b.data("x", (2, 5, 12), ["n", "t", 12]))

    def unpacked(name: str, *shape: int, axis: int) -> ir.Value:
        scales, zeros = b.w(f"{name}.scales", shape[axis]), stored(b, f"{name}.zeros", shape[axis])
        return b.op("com.microsoft.DequantizeLinear", stored(b, name, *shape), scales, zeros, axis=axis)

    inner = b.op("MatMul", x, unpacked("A", 12, INNER, axis=1))
    b.give(softmax(b, b.op("MatMul", b.op("Relu", inner), unpacked("B", INNER, 12, axis=0))))
    return b


def scale_found_at_run_time(b: Block, v: ir.Value) -> ir.Value:
    return b.op("DequantizeLinear", *b.ops("DynamicQuantizeLinear", v, outputs=3))


def few_bits(zeros: bool, **layout: int) -> Block:
    """MatMulNBits: whole blocks of 16, and pairs of blocks where zero points share a byte. `layout`: an attribute.

    With it, there is another pair of products.
    """
    b = Block()

    def product(x: ir.Value, name: str, size: int, columns: int) -> ir.Value:
        inputs = [stored(b, name, columns, size // 16, 8, kind=np.uint8), b.w(f"{name}.scales", columns * size // 16)]
        if zeros:
            inputs.append(stored(b, f"{name}.zeros", columns * size // 32, kind=np.uint8))
        return b.op("com.microsoft.MatMulNBits", x, *inputs, K=size, N=columns, bits=4, block_size=16, **layout)

    x = softmax(b, b.data("x", (2, 5, 32), ["n", "t", 32]))
    y = product(b.op("Relu", product(x, "A", 32, 128)), "B", 128, 32)
    b.give(beside(b, y) if layout else y)
    return b


def flat_blocks(b: Block, v: ir.Value) -> ir.Value:
    """MatMulBnb4 with blocks of 16."""
    scales = b.weight("C.scales", ir.tensor(np.abs(b.random("C.scales", 48 * 48 // 16))))
    how = {"K": 48, "N": 48, "block_size": 16, "quant_type": 1}
    return b.op("Relu", b.op("com.microsoft.MatMulBnb4", v, stored(b, "C", 48 * 48 // 2, kind=np.uint8), scales, **how))


def quantized_as_a_whole() -> Block:
    """A product that quantizes its input by itself, with scales, zero points and a bias by column."""
    b = Block()
    x = softmax(b, b.data("x", (2, 5, 12), ["n", "t", 12]))
    scales = b.weight("A.scales", ir.tensor(np.abs(b.random("A.scales", INNER)) * 0.01))
    inputs = stored(b, "A", 12, INNER), scales, stored(b, "A.zeros", INNER), b.w("A.bias", INNER)
    inner = b.op("Relu", b.op("com.microsoft.DynamicQuantizeMatMul", x, *inputs))
    b.give(softmax(b, b.op("MatMul", inner, b.w("B", INNER, 12))))
    return b


def few_bit_experts(
    bits: int = 4, blocks: bool = True, zeros: bool = False, dtype: type[np.floating] = np.float32, **layout: int
) -> Block:
    """A mixture whose activation is gated, between norms. `blocks`: of 16; without, there is a scale for each row.

    `layout`: as in `few_bits`.
    """
    b, wide, inner, experts, packed = Block(), 32, 96 if dtype == np.float32 else 192, 4, 8 // bits
    x = softmax(b, b.data("x", (2, 5, wide), ["n", "t", wide]))
    router = b.op("Softmax", b.op("MatMul", b.op("Reshape", x, b.ints(-1, wide)), b.w("R", wide, experts)))
    kind, number_type = "com.microsoft.QMoE", ir.DataType.from_numpy(np.dtype(dtype))
    x, router = (b.op("Cast", value, to=number_type) for value in (x, router))

    def matrix(name: str, rows: int, columns: int) -> tuple[list[ir.Value], ir.Value | None]:
        of_rows = (experts, rows, *([columns // 16] if blocks else []))
        scales = b.weight(
            f"{name}.scales", ir.tensor((np.abs(b.random(f"{name}.scales", *of_rows)) * 0.01).astype(dtype))
        )
        numbers = stored(b, name, experts, rows, columns // packed, kind=np.uint8)
        shape = (experts, rows, columns // 16 // packed)
        made = stored(b, f"{name}.zeros", *shape, kind=np.uint8) if zeros else None
        bias = b.weight(f"{name}.bias", ir.tensor(b.random(f"{name}.bias", experts, rows).astype(dtype)))
        return [numbers, scales, bias], made

    (first, own), (second, other) = matrix("A", 2 * inner, wide), matrix("B", wide, inner)
    extra = [None, None, None, own, other] if zeros else []
    how = {"k": 2, "expert_weight_bits": bits, "normalize_routing_weights": 1, "swiglu_fusion": 1}
    how |= {"block_size": 16, **layout} if blocks else {}
    made = b.op(kind, x, router, *first, *second, *extra, activation_type="swiglu", **how)
    y = softmax(b, b.op("Cast", made, to=ir.DataType.FLOAT))
    b.give(beside(b, y) if layout else y)
    return b


def beside(b: Block, y: ir.Value) -> ir.Value:
    """A pair of products that are split."""
    inner = b.op("Relu", b.op("MatMul", softmax(b, y), b.w("C", 32, 64)))
    return softmax(b, b.op("MatMul", inner, b.w("D", 64, 32)))


def embedded() -> Block:
    """Quantized tables and norm in one operator, replicated; the rest is split."""
    b = Block()
    given = b.indices("ids", [[0, 29], [7, 15]], ["n", "t"]), b.indices("kinds", [[0, 1], [1, 1]], ["n", "t"])
    ids = [b.op("Cast", value, to=ir.DataType.INT32) for value in given]
    shapes = {
        "words": (30, HIDDEN),
        "places": (8, HIDDEN),
        "types": (2, HIDDEN),
        "s": (HIDDEN,),
        "t": (HIDDEN,),
    }
    tables = [stored(b, name, *shape) for name, shape in shapes.items()]
    steps, zeros = ([b.constant(value, dtype)] * len(tables) for value, dtype in ((0.01, np.float32), (9, np.int8)))
    x = b.ops("com.microsoft.QEmbedLayerNormalization", *ids, *tables, None, *steps, *zeros, outputs=2)[0]
    inner = b.op("Relu", b.op("MatMul", x, b.w("A", HIDDEN, INNER)))
    b.give(softmax(b, b.op("MatMul", inner, b.w("B", INNER, HIDDEN))))
    return b


EXPERTS = {"A", "A.scales", "A.bias", "B", "B.scales"}
GRAPHS: dict[str, Tiny] = {
    "DequantizeLinear": Tiny(scales_by_column_and_block, "AaBb", sums=1, shares=SHARES),
    "QuantizeLinear": sandwich(rounded_activation(), shares=SHARES),
    "com.microsoft.DequantizeLinear": Tiny(
        scales_by_column, {"A", "A.scales", "A.zeros", "B", "B.scales", "B.zeros"}, sums=1
    ),
    "com.microsoft.QuantizeLinear": sandwich(rounded_by_column, split={"scales", "zeros"}),
    "DynamicQuantizeLinear": sandwich(scale_found_at_run_time),
    "com.microsoft.QEmbedLayerNormalization": Tiny(embedded, "AB", {"words", "places"}, sums=1),
    "com.microsoft.MatMulBnb4": Tiny(
        sandwich(flat_blocks, wide=48, narrow=48).build, {"C", "C.scales", "B"}, sums=1, shares=SHARES
    ),
    "com.microsoft.DynamicQuantizeMatMul": Tiny(
        quantized_as_a_whole, {"A", "A.scales", "A.zeros", "A.bias", "B"}, sums=1, shares=SHARES
    ),
    "com.microsoft.QMoE": Tiny(few_bit_experts, EXPERTS, {"B.bias", "R"}, sums=1, shares=SHARES),
    "com.microsoft.MatMulNBits": Tiny(
        lambda: few_bits(False), {"A", "A.scales", "B", "B.scales"}, sums=1, shares=SHARES
    ),
}
FORMS: dict[str, Tiny] = {
    "experts with zero points": Tiny(
        partial(few_bit_experts, zeros=True), EXPERTS | {"A.zeros", "B.zeros"}, sums=1, shares=SHARES
    ),
    "experts with a scale a row": Tiny(
        partial(few_bit_experts, blocks=False), EXPERTS - {"B.scales"}, {"B.scales"}, sums=1, shares=SHARES
    ),
    "experts of 8 bits": Tiny(partial(few_bit_experts, bits=8), EXPERTS, sums=1, shares=SHARES),
    "zero points of 4 bits": Tiny(lambda: few_bits(True), {"A", "A.scales", "B", "B.scales"}, sums=1, shares=SHARES),
    "fewer blocks than ranks": Tiny(few_blocks, "ABb", sums=1, shares=((1, 1, 1), (1, 1, 1, 1), (3, 1, 2))),
    "float8": Tiny(float8, {"A", "A.scales", "A.zeros", "B", "B.scales", "B.zeros"}),
    "one scale": sandwich(rounded_activation("com.microsoft.")),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_operator_is_sharded(name: str, tmp_path: Path) -> None:
    check_operator(GRAPHS, name, tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_other_form_is_sharded(form: str, tmp_path: Path) -> None:
    if form == "experts with a scale a row":
        need_experts("quantized")
    FORMS[form].check(tmp_path)


@pytest.mark.parametrize("check", [check_split, check_rows])
def test_weights_in_an_unknown_layout_of_a_kernel_stay_whole(
    check: Callable[[Block, Path, str, Sequence[Sequence[float]], set[str]], object], tmp_path: Path
) -> None:
    """Their elements are in an order that CPUs do not know: what is wrong on a GPU would agree here."""
    check(few_bits(False, weight_prepacked=3), tmp_path, "CD", TWO, {"A", "A.scales", "B", "B.scales"})


def test_experts_in_half_precision_are_cut_as_kernels_on_gpus_take_them(tmp_path: Path) -> None:
    """In multiples of 64: three units for two ranks, and for three."""
    b = few_bit_experts(dtype=np.float16, weights_prepacked=0)
    units = [
        {weight.name: weight.units for weight in plan.weights}["B"]
        for plan in check_split(b, tmp_path, {*EXPERTS, *"CD"}, ((2, 1), (1, 1, 1)), tolerance=4e-3)
    ]
    assert units == ["2,1", "1,1,1"]


@pytest.mark.parametrize(
    ("experts", "chosen", "wide", "inner", "bits", "zeros"),
    [(32, 4, 2880, 2880, 4, False), (64, 6, 2048, 1408, 4, True), (128, 8, 2048, 768, 8, False)],
)
def test_experts_of_usual_sizes_are_split(
    experts: int, chosen: int, wide: int, inner: int, bits: int, zeros: bool, tmp_path: Path
) -> None:
    """Trials with other sizes have to fit together: the bytes of a row, its scales, and as many experts as are chosen.

    The weights' file has a hole in place of gigabytes.
    """
    need_experts("quantized")
    kinds = {"f": onnx.TensorProto.FLOAT16, "u": onnx.TensorProto.UINT8}
    weights: dict[str, tuple[str, tuple[int, ...]]] = {"R": ("f", (wide, experts))}
    for name, rows, columns in (("A", 2 * inner, wide), ("B", wide, inner)):
        weights[name] = "u", (experts, rows, columns * bits // 8)
        weights[f"{name}s"] = "f", (experts, rows, columns // 64)
        weights[f"{name}b"] = "f", (experts, rows)
        weights[f"{name}z"] = "u", (experts, rows, columns // 64 * bits // 8)
    given = ["x", "p", "A", "As", "Ab", "B", "Bs", "Bb", "", "", "", *(["Az", "Bz"] if zeros else [])]
    how: dict[str, Any] = {
        "k": chosen,
        "expert_weight_bits": bits,
        "block_size": 64,
        "weights_prepacked": 0,
        "swiglu_fusion": 1,
    }
    nodes = [
        helper.make_node("MatMul", ["x", "R"], ["p"]),
        helper.make_node("QMoE", given, ["y"], domain="com.microsoft", activation_type="swiglu", **how),
    ]
    ends = [helper.make_tensor_value_info(name, kinds["f"], ["n", wide]) for name in "xy"]
    graph = helper.make_graph(nodes, "experts", ends[:1], ends[1:])
    for name, (kind, shape) in weights.items():
        if any(name in node.input for node in nodes):
            tensor = graph.initializer.add(name=name, data_type=kinds[kind], dims=shape, data_location="EXTERNAL")
            tensor.external_data.add(key="location", value="hole")
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / "model.onnx")
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(1 << 30)
    request = Request(split_mode="tensor", memory=("8GiB",), shapes={"x": (1, wide)})
    plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], request)
    assert {weight.name for weight in plan.weights if weight.units} >= {"A", "B", "As", "Bs", "Ab"}


def test_experts_that_may_be_in_the_layout_of_a_kernel_stay_whole(tmp_path: Path) -> None:
    """In half precision, where their shape does not tell it."""
    b = few_bit_experts(dtype=np.float16, weights_prepacked=-1)
    check_split(b, tmp_path, "CD", TWO, {"A", "A.scales", "B"}, tolerance=4e-3)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_that_do_not_divide_what_they_are_of(bits: int, zeros: bool, flat: bool, tmp_path: Path) -> None:
    """The last block is padded: the columns are still split, with their scales and zero points."""
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
