"""Products: matrices, Einsum, convolutions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from splitc.compiler.analysis.costs import node_flops
from tests.helpers.blocks import FLOAT, SHARES, Block, check_rows, check_split, sharded
from tests.helpers.operators import (
    HIDDEN,
    INNER,
    Tiny,
    as_float,
    check_operator,
    number,
    sandwich,
    stored,
    through,
)


def start(b: Block, *shape: int, axis: int = -1) -> ir.Value:
    """An input after a Softmax, which needs an axis whole."""
    return b.op("Softmax", b.data("x", shape or (2, 5, HIDDEN)), axis=axis)


def einsum() -> Block:
    b = Block()
    heads = b.op("Reshape", b.op("MatMul", start(b), b.w("A", 12, INNER)), b.ints(0, 0, 4, 6))
    joined = b.op(
        "Einsum", b.op("Einsum", heads, equation="...thd->...htd"), b.w("E", 4, 6, 12), equation="nhtd,hdf->ntf"
    )
    b.give(b.op("Softmax", joined))
    return b


def gemm(opset: int = 17) -> Block:
    """Gemm with transposed inputs, factors and biases."""
    b = Block(opset)
    x = b.op("Softmax", b.data("x", (5, 12), ["t", 12]))
    inner = b.op("Gemm", x, b.w("A", INNER, 12), b.w("a", INNER), transB=1, alpha=0.5, beta=2.0)
    turned = b.op("Transpose", b.op("Relu", inner), perm=[1, 0])
    b.give(b.op("Gemm", turned, b.w("B", INNER, 12), b.w("b", 12), transA=1, beta=0.5), shape=["t", 12])
    return b


def weight_on_the_left_transposed_or_batched() -> Block:
    b = Block()
    x = b.op("Softmax", b.data("x", (2, 12, 5), ["n", 12, "t"]), axis=1)
    inner = b.op("MatMul", b.w("A", INNER, 12), x)
    batched = b.op("MatMul", b.op("Transpose", inner, perm=[0, 2, 1]), b.w("B", 1, INNER, 12))
    last = b.op("MatMul", b.op("Softmax", batched), b.op("Transpose", b.w("C", INNER, 12), perm=[1, 0]))
    b.give(b.op("MatMul", b.op("Relu", last), b.w("D", INNER, 12)))
    return b


def quantized(b: Block, v: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The value in 8 bits, its scale and its zero point."""
    scale, zero = number(b, 0.05), b.constant(128, np.uint8)
    return b.op("QuantizeLinear", v, scale, zero), scale, zero


def integer_products() -> Block:
    """Integer products with fixed scales."""
    b = Block()

    def product(v: ir.Value, name: str, *shape: int) -> ir.Value:
        left, _, zero = quantized(b, v)
        whole = b.op("MatMulInteger", left, stored(b, name, *shape), zero, stored(b, f"{name}.zeros", shape[-1]))
        return b.op("Mul", as_float(b, whole), number(b, 0.001))

    b.give(product(b.op("Relu", product(start(b), "A", 12, INNER)), "B", INNER, 12))
    return b


def integer_products_to_floats() -> Block:
    """Integer products with a scale and a zero point for each column, and a bias that is added once."""
    b = Block()

    def product(v: ir.Value, name: str, *shape: int) -> ir.Value:
        left, scale, zero = quantized(b, v)
        scales = b.op("Mul", b.w(f"{name}.scales", shape[-1]), number(b, 0.02))
        zeros = stored(b, f"{name}.zeros", shape[-1])
        more = (scale, scales, zero, zeros, b.w(f"{name}.bias", shape[-1]))
        return b.op("com.microsoft.MatMulIntegerToFloat", left, stored(b, name, *shape), *more)

    b.give(product(b.op("Relu", product(start(b), "A", 12, INNER)), "B", INNER, 12))
    return b


def fused_products() -> Block:
    b = Block()
    inner = b.op("com.microsoft.FusedMatMul", start(b), b.w("A", INNER, 12), transB=1, alpha=0.5)
    turned = b.op("Transpose", b.op("Relu", inner), perm=[0, 2, 1])
    last = b.op("com.microsoft.FusedMatMul", turned, b.w("B", INNER, 12), transA=1)
    b.give(b.op("Softmax", last))
    return b


def convolutions() -> Block:
    b = Block()
    x = b.op("Softmax", b.data("x", (2, 6, 8, 8), ["n", 6, "h", "w"]), axis=1)
    wide = b.op("Relu", b.op("Conv", x, b.w("A", INNER, 6, 3, 3), b.w("a", INNER), pads=[1] * 4))
    grouped = b.op("Conv", wide, b.w("G", INNER, 3, 3, 3), group=8, pads=[1] * 4)
    back = b.op("Conv", b.op("Sigmoid", grouped), b.w("B", 6, INNER, 1, 1), b.w("b", 6))
    b.give(b.op("Softmax", b.op("Add", x, back), axis=1), shape=["n", 6, "h", "w"])
    return b


def deformed_convolutions() -> Block:
    """By its output channels, by groups, by its input channels; and one whose offsets are of some channels each."""
    b = Block(19)
    x = start(b, 2, 6, 5, 5, axis=1)
    moves = b.op("Tanh", b.data("moves", (2, 8, 5, 5)))
    places: dict[str, Any] = {"kernel_shape": [2, 2], "pads": [0, 0, 1, 1]}
    wide = b.op("Relu", b.op("DeformConv", x, b.w("A", INNER, 6, 2, 2), moves, b.w("a", INNER), **places))
    weights = b.op("Sigmoid", b.data("weights", (2, 4, 5, 5)))
    grouped = b.op("DeformConv", wide, b.w("G", INNER, 3, 2, 2), moves, None, weights, group=8, **places)
    back = b.op("Softmax", b.op("DeformConv", grouped, b.w("B", 6, INNER, 2, 2), moves, b.w("b", 6), **places), axis=1)
    two = b.op("Concat", moves, moves, axis=1)
    b.give(b.op("DeformConv", back, b.w("C", 4, 6, 2, 2), two, offset_group=2, **places), shape=[2, 4, 5, 5])
    return b


def transposed_convolutions() -> Block:
    """Column-parallel, by groups, then row-parallel."""
    b = Block()
    x = start(b, 2, 6, 4, 4, axis=1)
    wide = b.op("Relu", b.op("ConvTranspose", x, b.w("C", 6, INNER, 2, 2), b.w("c", INNER), strides=[2, 2]))
    grouped = b.op("ConvTranspose", wide, b.w("G", INNER, 3, 1, 1), group=8)
    b.give(
        b.op("ConvTranspose", b.op("Tanh", grouped), b.w("D", INNER, 6, 2, 2), b.w("d", 6)), shape=["n", 6, "h", "w"]
    )
    return b


def integer_convolutions() -> Block:
    b = Block()

    def product(v: ir.Value, name: str, *shape: int) -> ir.Value:
        left, _, zero = quantized(b, v)
        whole = b.op("ConvInteger", left, stored(b, name, *shape, kind=np.uint8), zero, b.constant(120, np.uint8))
        return b.op("Mul", as_float(b, whole), number(b, 0.001))

    x = start(b, 2, 6, 4, 4, axis=1)
    b.give(product(b.op("Relu", product(x, "A", INNER, 6, 3, 3)), "B", 6, INNER, 1, 1), shape=["n", 6, "h", "w"])
    return b


def experts() -> Block:
    """Plain experts with biases, then gated ones, whose two products are one matrix."""
    b = Block()

    def mixture(v: ir.Value, names: str, inner: int, **attributes: object) -> ir.Value:
        tokens = b.op("Reshape", v, b.ints(-1, 12))
        router = b.op("Softmax", b.op("MatMul", tokens, b.w(f"R{names}", 12, 4)))
        first, second = b.w(names[0], 4, inner, 12), b.w(names[1], 4, 12, INNER)
        biases = b.w(names[0].lower(), 4, inner), b.w(names[1].lower(), 4, 12)
        weights = first, biases[0], second, biases[1]
        made = b.op("com.microsoft.MoE", v, router, *weights, k=2, normalize_routing_weights=1, **attributes)
        return b.op("Softmax", made)

    plain = mixture(start(b), "AB", INNER, activation_type="relu")
    b.give(mixture(plain, "CD", 2 * INNER, activation_type="swiglu", swiglu_fusion=1, activation_beta=1.0))
    return b


GRAPHS: dict[str, Tiny] = {
    "MatMul": Tiny(weight_on_the_left_transposed_or_batched, "ABCD", sums=2, shares=SHARES),
    "MatMulInteger": Tiny(integer_products, "AB", sums=1, shares=SHARES),
    "com.microsoft.MatMulIntegerToFloat": Tiny(
        integer_products_to_floats,
        {"A", "A.scales", "A.zeros", "A.bias", "B"},
        {"B.scales", "B.zeros", "B.bias"},
        sums=1,
    ),
    "com.microsoft.FusedMatMul": Tiny(fused_products, "AB", sums=1),
    "Gemm": Tiny(gemm, {"A", "a", "B"}, {"b"}, sums=1, shares=SHARES),
    "Einsum": Tiny(einsum, "AE", sums=1, shares=SHARES),
    "Conv": Tiny(convolutions, "AaGB", "b", sums=1, shares=SHARES),
    "DeformConv": Tiny(deformed_convolutions, "AaGB", "b", sums=1, shares=SHARES),
    "ConvTranspose": Tiny(transposed_convolutions, "CcGD", "d", sums=1, shares=SHARES),
    "com.microsoft.MoE": Tiny(experts, "AaBCcD", "bd", sums=2, shares=SHARES),
    "ConvInteger": Tiny(integer_convolutions, "AB", sums=1),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_operator_is_sharded(name: str, tmp_path: Path) -> None:
    check_operator(GRAPHS, name, tmp_path)


def test_bias_that_may_not_be_left_out(tmp_path: Path) -> None:
    """Before opset 11. Ranks that do not add it add zero."""
    check_split(gemm(10), tmp_path, {"A", "a", "B"}, SHARES, {"b"}, sums=1)


@pytest.mark.parametrize("has_operators", [True, False])
def test_bias_that_is_itself_a_sum(tmp_path: Path, has_operators: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one rank adds it, but all take part in its sum, inside of engines and between them."""
    if not has_operators:
        monkeypatch.setattr("splitc.runtime.engines.operator_library.is_built", lambda: False)
    b = Block()
    x = b.op("Softmax", b.data("x", (5, 12), ["t", 12]))
    bias = b.op("Sigmoid", b.op("MatMul", b.op("Relu", b.op("MatMul", x, b.w("A", 12, INNER))), b.w("B", INNER, 12)))
    made = b.op("MatMul", b.op("Relu", b.op("MatMul", bias, b.w("C", 12, INNER))), b.w("D", INNER, 12))
    b.give(
        b.op("Softmax", b.op("Gemm", b.op("Relu", b.op("MatMul", x, b.w("E", 12, INNER))), b.w("F", INNER, 12), made))
    )
    check_split(b, tmp_path, "ABCDEF", SHARES, sums=3)


@pytest.mark.parametrize(
    ("kind", "attributes", "shapes", "flops"),
    [
        ("MatMul", {}, [(2, 5, 12), (12, 24), (2, 5, 24)], 2 * 10 * 12 * 24),
        ("MatMulInteger", {}, [(5, 12), (12, 24), (5, 24)], 2 * 5 * 12 * 24),
        ("com.microsoft.FusedMatMul", {"transB": 1}, [(5, 12), (24, 12), (5, 24)], 2 * 5 * 12 * 24),
        ("com.microsoft.FusedMatMul", {"transA": 1}, [(12, 5), (12, 24), (5, 24)], 2 * 5 * 12 * 24),
        (
            "com.microsoft.FusedMatMul",
            {"transA": 1, "transBatchA": 1},
            [(12, 3, 5), (3, 12, 24), (3, 5, 24)],
            2 * 3 * 5 * 12 * 24,
        ),
        ("com.microsoft.MatMulIntegerToFloat", {}, [(5, 12), (12, 24), (), (), (5, 24)], 2 * 5 * 12 * 24),
        ("Einsum", {"equation": "bik, kj -> bij"}, [(2, 5, 12), (12, 24), (2, 5, 24)], 2 * 2 * 5 * 12 * 24),
        ("Einsum", {"equation": "ik,kj"}, [(5, 12), (12, 24), (5, 24)], 2 * 5 * 12 * 24),
        ("Einsum", {"equation": "...ik,...kj->...ij"}, [(2, 5, 12), (1, 12, 24), (2, 5, 24)], 2 * 2 * 5 * 12 * 24),
        ("Einsum", {"equation": "i,j->ij"}, [(5,), (7,), (5, 7)], 5 * 7),
        ("Einsum", {"equation": "ij->i"}, [(5, 7), (5,)], 5 * 7),
        ("Einsum", {"equation": "ij,jk,kl->il"}, [(5, 6), (6, 7), (7, 8), (5, 8)], 2 * 5 * 6 * 7 + 2 * 5 * 7 * 8),
        ("Einsum", {"equation": "bij,bjk->bik"}, [(), (), ()], 2),
        ("Gemm", {}, [(5, 12), (12, 24), (5, 24)], 2 * 5 * 12 * 24),
        ("Gemm", {"transA": 1}, [(12, 5), (12, 24), (5, 24)], 2 * 5 * 12 * 24),
        ("Conv", {"group": 2}, [(1, 6, 8), (4, 3, 3), (1, 4, 6)], 2 * 4 * 6 * 3 * 3),
        ("ConvInteger", {}, [(1, 6, 8), (4, 6, 3), (1, 4, 6)], 2 * 4 * 6 * 6 * 3),
        ("QLinearConv", {}, [(1, 6, 8), (), (), (4, 6, 3), (1, 4, 6)], 2 * 4 * 6 * 6 * 3),
        ("ConvTranspose", {}, [(1, 6, 8), (6, 4, 3), (1, 4, 10)], 2 * 6 * 8 * 4 * 3),
        (
            "com.microsoft.MoE",
            {"k": 2},
            [(1, 5, 12), (5, 4), (4, 24, 12), (4, 24), (4, 12, 24), (4, 12), (1, 5, 12)],
            2 * 5 * 2 * (24 * 12 + 12 * 24),
        ),
        ("QLinearMatMul", {}, [(5, 12), (), (), (12, 24), (5, 24)], 2 * 5 * 12 * 24),
        ("com.microsoft.MatMulNBits", {"K": 32, "N": 24}, [(5, 32), (24, 2, 8), (48,), (5, 24)], 2 * 5 * 32 * 24),
        ("com.microsoft.QAttention", {}, [(1, 5, 12), (12, 72), (72,), (1, 5, 24)], 2 * 5 * 12 * 72 + 4 * 5 * 24 * 5),
        ("com.microsoft.Attention", {}, [(1, 5, 12), (12, 72), (72,), (1, 5, 24)], 2 * 5 * 12 * 72 + 4 * 5 * 24 * 5),
    ],
)
def test_flops(kind: str, attributes: dict[str, int], shapes: list[tuple[int, ...]], flops: int) -> None:
    """A multiplication and an addition for each element of the result and each summed element."""
    *inputs, _ = (ir.Value(name=f"x{place}") for place in range(len(shapes)))
    domain, _, name = kind.rpartition(".")
    node = ir.node(name, inputs, attributes, domain=domain)
    node.outputs[0].name = "y"
    names = [*(value.name or "" for value in inputs), "y"]
    assert node_flops(node, dict(zip(names, shapes))) == flops


def test_sums_of_two_axes_in_one_node(tmp_path: Path) -> None:
    """If both axes were split, the ranks would lack products of elements on different ranks."""
    b = Block()
    x = b.op("Softmax", b.data("x", (5, 12)))
    first, second = (b.op("MatMul", x, b.w(name, 12, INNER)) for name in "AB")
    b.give(b.op("Einsum", first, second, equation="bi,bj->b"), shape=[5])
    check_split(b, tmp_path, "", [(1, 1)], sums=1)


@pytest.mark.parametrize("kind", [np.uint32, np.uint64])
def test_product_of_a_type_that_ranks_may_lack(kind: type[np.unsignedinteger], tmp_path: Path) -> None:
    """The weight stays whole if ranks can't sum the type."""
    b = Block()
    numbers = np.random.default_rng(0)
    positive = b.op("Mul", b.op("Abs", b.data("x", (5, 12))), number(b, 9))
    x = b.op("Cast", positive, to=ir.DataType.from_numpy(np.dtype(kind)))
    for name, shape in (("A", (12, INNER)), ("B", (INNER, 12))):
        x = b.op("MatMul", x, b.weight(name, ir.tensor(numbers.integers(0, 9, shape).astype(kind))))
    y = b.op("Relu", b.op("MatMul", b.op("Cast", x, to=FLOAT), b.w("C", 12, INNER)))
    b.give(b.op("MatMul", y, b.w("D", INNER, 12)), shape=[5, 12])
    whole = "A" if kind is np.uint64 else ""
    check_split(b, tmp_path, "CD", [(1, 1)], whole)


@pytest.mark.parametrize("inner", [INNER, 2])
def test_integer_product_with_a_scale_found_at_run_time(inner: int, tmp_path: Path) -> None:
    """As ONNX Runtime's quantize_dynamic writes it: the ranks compute the scale of the whole value together."""
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
    assert all(sharded(plan).sums.count == 2 for plan in plans)


def test_experts_as_batched_products(tmp_path: Path) -> None:
    """Each expert is sliced; the router's weights are whole."""
    b = Block()
    x = b.data("x", (2, 5, 12), ["n", "t", 12])
    chances = b.op("Softmax", b.op("MatMul", x, b.w("router", 12, 3)), axis=-1)
    inner = b.op("Relu", b.op("MatMul", b.op("Unsqueeze", x, b.ints(1)), b.w("up", 3, 12, INNER)))
    outer = b.op("MatMul", inner, b.w("down", 3, INNER, 12))
    by_expert = b.op("Unsqueeze", b.op("Transpose", chances, perm=[0, 2, 1]), b.ints(3))
    b.give(b.op("Add", x, b.op("ReduceSum", b.op("Mul", outer, by_expert), b.ints(1), keepdims=0)))
    (plan, *_) = check_split(b, tmp_path, {"up", "down"}, whole={"router"}, sums=1)
    (value,) = sharded(plan).sums.summed
    producer = value.producer()
    assert producer is not None
    assert producer.op_type == "ReduceSum", "the sum is after the experts are added up, where it is smallest"


def test_head_alone_is_split_and_its_result_joined(tmp_path: Path) -> None:
    b = Block()
    ids = b.indices("ids", [[0, 29], [7, 15]], ["n", "t"])
    hidden = b.op("Softmax", b.op("Gather", b.w("table", 30, 12), ids, axis=0))
    b.give(b.op("MatMul", hidden, b.w("head", 12, 30)), shape=["n", "t", 30])
    check_split(b, tmp_path, {"head"}, whole={"table"}, sums=0)


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


def test_unit_that_a_rank_lacks_is_a_copy_that_does_not_count(tmp_path: Path) -> None:
    """An axis of two on four ranks: two ranks run with a copy of another's unit, and add nothing to the sum."""
    (plan,) = check_split(
        sandwich(through("Relu"), wide=2, narrow=2).build(), tmp_path, {"A", "B"}, [(1, 1, 1, 1)], sums=1
    )
    (ranges,) = sharded(plan).ranges.values()
    assert [units.owned for units in ranges].count(True) == 2


def test_columns_of_an_integer_product_to_floats_are_sliced(tmp_path: Path) -> None:
    """In row mode: the matrix, and the scales and zero points of its columns."""
    check_rows(integer_products_to_floats(), tmp_path, "AB", rounds=2)
