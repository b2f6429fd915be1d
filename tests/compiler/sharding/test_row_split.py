"""Which matmuls row mode slices, for each form of weights, and that the slices make up the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from models.writer import save
from splitc.compiler import Plan, Request, plan_model
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.package.steps import Receive, Run, Send
from tests.helpers.blocks import FLOAT, Block, check_rows, sliced

# Sides of the matrices. Columns come in fours where they are quantized in blocks.
ROWS, COLUMNS = 32, 24
GENERATOR = np.random.default_rng(0)


def stored(b: Block, name: str, array: Any) -> ir.Value:
    return b.weight(name, ir.tensor(array))


def int8(b: Block, name: str, *shape: int) -> ir.Value:
    return stored(b, name, GENERATOR.integers(-100, 100, shape, dtype=np.int8))


def transposed(b: Block, x: ir.Value) -> ir.Value:
    return b.op("MatMul", x, b.op("Transpose", b.w("A", COLUMNS, ROWS), perm=[1, 0]))


def cast(b: Block, x: ir.Value) -> ir.Value:
    half = stored(b, "A", b.random("A", ROWS, COLUMNS).astype(np.float16))
    return b.op("MatMul", x, b.op("Cast", half, to=FLOAT))


def reshaped(b: Block, x: ir.Value) -> ir.Value:
    """By heads, as some exporters write it."""
    return b.op("MatMul", x, b.op("Reshape", b.w("A", ROWS, 6, 4), b.ints(ROWS, COLUMNS)))


def fused_ones(b: Block, x: ir.Value) -> ir.Value:
    """Two projections whose weights are slices of one weight."""
    first, second = b.ops("Split", b.w("A", ROWS, 2 * COLUMNS), outputs=2, axis=1, num_outputs=2)
    return b.op("Add", b.op("MatMul", x, first), b.op("Relu", b.op("MatMul", x, second)))


def gemm(b: Block, x: ir.Value) -> ir.Value:
    flat = b.op("Reshape", x, b.ints(-1, ROWS))
    product = b.op("Gemm", flat, b.w("A", COLUMNS, ROWS), b.w("A.bias", COLUMNS), transB=1, alpha=0.5)
    return b.op("Reshape", product, b.ints(2, 5, COLUMNS))


def fused(b: Block, x: ir.Value) -> ir.Value:
    return b.op("com.microsoft.FusedMatMul", x, b.w("A", COLUMNS, ROWS), transB=1, alpha=0.5)


def few_bits(zeros: bool) -> Callable[[Block, ir.Value], ir.Value]:
    def product(b: Block, x: ir.Value) -> ir.Value:
        packed = GENERATOR.integers(0, 255, (COLUMNS, ROWS // 16, 8), dtype=np.uint8)
        inputs = [stored(b, "A", packed), b.w("A.scales", COLUMNS * ROWS // 16)]
        if zeros:
            inputs.append(stored(b, "A.zeros", GENERATOR.integers(0, 255, COLUMNS * ROWS // 32, dtype=np.uint8)))
        return b.op("com.microsoft.MatMulNBits", x, *inputs, K=ROWS, N=COLUMNS, bits=4, block_size=16)

    return product


def scaled(axis: int, *scales: int, **attributes: int) -> Callable[[Block, ir.Value], ir.Value]:
    """An 8-bit weight with scales along this axis, and zero points alike."""

    def product(b: Block, x: ir.Value) -> ir.Value:
        weight = int8(b, "A", ROWS, COLUMNS)
        inputs = (weight, b.w("A.scales", *scales), int8(b, "A.zeros", *scales))
        return b.op("MatMul", x, b.op("DequantizeLinear", *inputs, axis=axis, **attributes))

    return product


def integers(b: Block, x: ir.Value) -> ir.Value:
    """As quantize_dynamic writes it: the activation's scale is computed at run time."""
    quantized, scale, zero = b.ops("DynamicQuantizeLinear", x, outputs=3)
    whole = b.op("MatMulInteger", quantized, int8(b, "A", ROWS, COLUMNS), zero, int8(b, "A.zeros", COLUMNS))
    return b.op("Mul", b.op("Cast", whole, to=FLOAT), b.op("Mul", scale, b.w("A.scales", COLUMNS)))


def unpacked(b: Block, x: ir.Value) -> ir.Value:
    """Quantized and unpacked on both sides, as static quantization writes it."""
    scale, zero = b.constant(0.05, np.float32), b.constant(3, np.uint8)
    seen = b.op("DequantizeLinear", b.op("QuantizeLinear", x, scale, zero), scale, zero)
    weight = b.op("DequantizeLinear", int8(b, "A", ROWS, COLUMNS), b.constant(0.01, np.float32))
    return b.op("MatMul", seen, weight)


def rounded(b: Block, x: ir.Value) -> ir.Value:
    """QLinearMatMul, whose result is quantized too."""
    scale, zero = b.constant(0.05, np.float32), b.constant(3, np.uint8)
    quantized = b.op("QuantizeLinear", x, scale, zero)
    weight = (int8(b, "A", ROWS, COLUMNS), b.constant(0.01, np.float32), b.constant(0, np.int8))
    result = (b.constant(0.2, np.float32), b.constant(128, np.uint8))
    return b.op("DequantizeLinear", b.op("QLinearMatMul", quantized, scale, zero, *weight, *result), *result)


def halves(b: Block, x: ir.Value) -> ir.Value:
    """In half precision, for which ONNX Runtime's CPU provider has few kernels: it computes in single precision."""
    half = b.op("Tanh", b.op("Cast", x, to=ir.DataType.FLOAT16))
    product = b.op("MatMul", half, stored(b, "A", b.random("A", ROWS, COLUMNS).astype(np.float16)))
    return b.op("Cast", b.op("Tanh", product), to=FLOAT)


FORMS: dict[str, Callable[[Block, ir.Value], ir.Value]] = {
    "plain": lambda b, x: b.op("MatMul", x, b.w("A", ROWS, COLUMNS)),
    "transposed": transposed,
    "cast": cast,
    "halves": halves,
    "reshaped": reshaped,
    "cut off": fused_ones,
    "gemm": gemm,
    "fused": fused,
    "4 bits": few_bits(False),
    "4 bits with zero points": few_bits(True),
    "scaled by column": scaled(1, COLUMNS),
    "scaled by blocks of rows": scaled(0, ROWS // 8, COLUMNS, block_size=8),
    "scaled by blocks of columns": scaled(1, ROWS, COLUMNS // 4, block_size=4),
    "integers": integers,
    "unpacked": unpacked,
    "rounded": rounded,
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_every_form_are_sliced(form: str, tmp_path: Path) -> None:
    b = Block(opset=21)
    x = b.op("Softmax", b.data("x", (2, 5, ROWS), ["n", "t", ROWS]))
    b.give(b.op("Relu", FORMS[form](b, x)))
    split = {"A", "A.scales"} if "scaled" in form or "bits" in form else {"A"}
    plans = check_rows(b, tmp_path, split, rounds=1, tolerance=1e-3 if form == "halves" else 2e-5)
    if "blocks of columns" in form:
        assert [weight.units for weight in plans[0].weights if weight.name == "A"] == ["3,3"]


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that can't send and receive."""
    monkeypatch.setattr("splitc.compiler.lowering.segments.has_collectives", lambda *_: False)


def operators(plan: Plan, rank: int) -> list[ir.Node]:
    """A rank's operators for transfers and matmuls, in an order that their inputs allow."""
    (graph,) = plan.program(rank).graphs
    return [node for node in graph if node.domain == "splitc" or node.op_type == "MatMul"]


def kinds_of(plan: Plan, rank: int) -> str:
    return " ".join(node.op_type for node in operators(plan, rank))


@pytest.mark.parametrize("form", ["plain", "cut off", "4 bits", "integers", "unpacked"])
def test_weights_are_sliced_between_segments_too(form: str, tmp_path: Path, segments: None) -> None:
    test_weights_of_every_form_are_sliced(form, tmp_path)


def one_activation() -> Block:
    b = Block()
    x = b.op("Softmax", b.data("x", (2, 5, 12), ["n", "t", 12]))
    q, k, v = (b.op("MatMul", x, b.w(name, 12, 12)) for name in "qkv")
    b.give(b.op("MatMul", b.op("Add", b.op("Mul", q, k), v), b.w("o", 12, 12)))
    return b


def test_products_of_one_activation_are_one_round_trip(tmp_path: Path) -> None:
    (plan, *_) = check_rows(one_activation(), tmp_path, "qkvo", rounds=2)
    three, one = "MatMul MatMul MatMul After Send Send Send", "MatMul After Send"
    assert kinds_of(plan, 1) == f"Receive {three} Receive {one}"
    # Its own columns are in the middle: the main rank multiplies while the other does.
    three, one = "MatMul MatMul MatMul After Receive Receive Receive", "MatMul After Receive"
    assert kinds_of(plan, 0) == f"Send {three} Send {one}"
    for number in (0, 1):
        nodes = operators(plan, number)
        made = {value for node in nodes for value in node.outputs}
        assert all(made & set(node.inputs) for node in nodes[1:] if node.domain == "splitc")


def test_products_of_one_activation_are_one_round_trip_of_segments(tmp_path: Path, segments: None) -> None:
    (plan, *_) = check_rows(one_activation(), tmp_path, "qkvo", rounds=2)
    kinds = [type(step) for step in plan.program(1).steps]
    assert kinds == [Receive, Run, Send, Send, Send, Receive, Run, Send]
    kinds = [type(step) for step in plan.program(0).steps]
    assert kinds == [Run, Send, Run, Receive, Receive, Receive, Run, Send, Run, Receive, Run]


def test_what_several_rounds_take_is_sent_once(tmp_path: Path) -> None:
    """The keys of cross attention in each layer are computed from the encoder's output."""
    b = Block()
    seen = b.op("Softmax", b.data("seen", (2, 7, 12), ["n", "s", 12]))
    x = b.op("Softmax", b.data("x", (2, 5, 12), ["n", "t", 12]))
    for layer in range(3):
        keys = b.op("MatMul", seen, b.w(f"k{layer}", 12, 12))
        query = b.op("MatMul", x, b.w(f"q{layer}", 12, 12))
        scores = b.op("MatMul", query, b.op("Transpose", keys, perm=[0, 2, 1]))
        x = b.op("MatMul", b.op("Softmax", scores), seen)
    b.give(x)
    (plan, *_) = check_rows(b, tmp_path, {f"{part}{layer}" for part in "qk" for layer in range(3)}, rounds=3)
    assert kinds_of(plan, 1).split().count("Receive") == kinds_of(plan, 0).split().count("Send") == 4


def test_products_of_inputs_of_each_other_and_of_outputs(tmp_path: Path) -> None:
    """No other node of the model is between them: inputs are sent as fed, and results are sent on and returned."""
    b = Block()
    x = b.data("x", (2, 5, 12), ["n", "t", 12])
    first = b.op("MatMul", x, b.w("A", 12, 16))
    second = b.op("MatMul", first, b.w("B", 16, 12))
    b.give(first, "first")
    b.give(second, "second")
    check_rows(b, tmp_path, "AB", rounds=2)


def test_value_with_the_name_of_a_ranks_columns(tmp_path: Path, segments: None) -> None:
    b = Block()
    x = b.op("Softmax", b.data("x", (2, 5, 12), ["n", "t", 12]))
    product = b.op("MatMul", x, b.w("A", 12, 16))
    other = b.op("Relu", product)
    other.name = f"{product.name}/rank1"
    b.give(b.op("Add", other, product))
    check_rows(b, tmp_path, "A", rounds=1)


def test_activation_is_sent_as_it_is_before_it_is_unpacked(tmp_path: Path) -> None:
    b = Block()
    x = b.op("Softmax", b.data("x", (2, 5, ROWS), ["n", "t", ROWS]))
    b.give(b.op("Relu", unpacked(b, x)))
    (plan, *_) = check_rows(b, tmp_path, "A", rounds=1)
    ((product,),) = sliced(plan).rounds
    assert [value.dtype for value in product.takes] == [ir.DataType.UINT8]
    assert plan.cuts[0].bytes == 10 * ROWS + 10 * COLUMNS // 2 * 4


def test_vector_is_multiplied(tmp_path: Path) -> None:
    b = Block()
    b.give(b.op("Relu", b.op("MatMul", b.data("x", (12,)), b.w("A", 12, 16))), shape=[16])
    check_rows(b, tmp_path, "A", rounds=1)


def test_weight_of_several_layers_is_stored_once_a_rank(tmp_path: Path) -> None:
    """As in ALBERT, with a bias of equal numbers that exporters share with another reader."""
    b = Block()
    weight, bias = b.w("A", 64, 64), b.w("bias", 64)
    x = b.data("x", (10, 64), ["n", 64])
    for _ in range(4):
        x = b.op("Relu", b.op("Gemm", x, weight, bias))
    b.give(b.op("Add", x, bias), shape=["n", 64])
    for plan in check_rows(b, tmp_path, "A", rounds=4):
        held = [rank.memory.weights for rank in plan.ranks]
        assert sum(held) < 1.3 * 64 * 64 * 4  # packed columns are in whole blocks
        for number in range(len(plan.ranks)):
            (graph,) = plan.program(number).graphs
            assert len([name for name in graph.initializers if name.startswith("A/rank")]) == 1
    files = {file.path: file.bytes for file in read_manifest(tmp_path / "package").files}
    stored = sum(size for path, size in files.items() if path.endswith(".weights"))
    assert stored < 1.1 * 64 * 64 * 4


def whole(b: Block, x: ir.Value, how: str) -> ir.Value:
    """A product with the weight A that must stay whole."""
    weight = b.w("A", 3, 12, 12) if how == "stack" else b.w("A", 12, 12)
    if how == "looked up":
        rows = b.op("Gather", weight, b.indices("ids", [[1, 2, 3, 4, 5]] * 2, ["n", "t"]))
        return b.op("MatMul", b.op("Add", x, rows), weight)
    if how == "both ways":
        return b.op("MatMul", b.op("Relu", b.op("MatMul", x, weight)), b.op("Transpose", weight, perm=[1, 0]))
    if how == "from the left":
        return b.op("MatMul", weight, b.op("Transpose", x, perm=[0, 2, 1]))
    if how == "stack":
        return b.op("ReduceSum", b.op("MatMul", b.op("Unsqueeze", x, b.ints(1)), weight), b.ints(1), keepdims=0)
    if how == "computed bias":
        bias = b.op("ReduceMax", b.op("Reshape", x, b.ints(-1, 12)), axes=[0], keepdims=0)
        return b.op("Gemm", b.op("Reshape", x, b.ints(-1, 12)), weight, bias)
    assert how == "given"
    b.give(b.op("Identity", weight), "copy", [12, 12])
    return b.op("MatMul", x, weight)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("looked up", "Gather"),
        ("both ways", "has an input with the same axis as its columns"),
        ("from the left", "not as its weight matrix"),
        ("stack", "multiplies by 3 x 12 x 12, which is not a matrix"),
        ("computed bias", "has an input with the same axis as its columns"),
        ("given", "Identity"),
    ],
)
def test_weight_that_is_needed_whole_stays_so(how: str, reason: str, tmp_path: Path) -> None:
    b = Block()
    x = b.op("Softmax", b.data("x", (2, 5, 12), ["n", "t", 12]))
    other = b.op("MatMul", x, b.w("B", 12, 48))
    b.give(whole(b, x, how))
    b.give(b.op("Relu", other), "z")
    plans = check_rows(b, tmp_path, "B", shares=[(1, 1)], whole="A")
    assert reason in next(weight.reason or "" for weight in plans[0].weights if weight.name == "A")


@pytest.mark.parametrize("shares", [(1, 2, 3), (5, 1), (1, 1, 1, 1, 1)])
def test_slices_keep_to_the_shares_over_many_products(shares: Sequence[float], tmp_path: Path) -> None:
    """Seven columns a product can't be divided by the shares exactly; the next product makes up for the remainder."""
    b = Block()
    x = b.op("Softmax", b.data("x", (2, 7), ["n", 7]))
    for layer in range(20):
        x = b.op("Relu", b.op("MatMul", x, b.w(f"A{layer}", 7, 7)))
    b.give(x, shape=["n", 7])
    (plan,) = check_rows(b, tmp_path, {f"A{layer}" for layer in range(1, 19)}, shares=[shares])
    held = np.sum([[int(units) for units in weight.units.split(",")] for weight in plan.weights if weight.units], 0)
    assert np.abs(held / held.sum() - np.array(shares) / sum(shares)).max() < 0.02


def test_products_that_the_shares_leave_to_the_main_rank_are_no_round_trip(tmp_path: Path) -> None:
    b = Block()
    x = b.op("Softmax", b.data("x", (2, 5, 40), ["n", "t", 40]))
    few = b.op("Relu", b.op("MatMul", x, b.w("few", 40, 2)))
    b.give(b.op("MatMul", b.op("Concat", few, b.op("MatMul", x, b.w("many", 40, 38)), axis=-1), b.w("B", 40, 40)))
    (plan,) = check_rows(b, tmp_path, ["many", "B"], shares=[(8, 1)], whole=["few"])
    (weight,) = (weight for weight in plan.weights if weight.name == "few")
    assert weight.reason == "the shares leave all its columns to the main device"


def test_matrices_are_measured_as_they_are_multiplied(tmp_path: Path) -> None:
    """--row-min counts rows and columns, also of packed and transposed matrices."""
    b = Block()
    x = b.op("Softmax", b.data("x", (2, 5, 32), ["n", "t", 32]))
    packed = GENERATOR.integers(0, 255, (24, 2, 8), dtype=np.uint8)
    wide = b.op("com.microsoft.MatMulNBits", x, stored(b, "A", packed), b.w("s", 48), K=32, N=24, bits=4, block_size=16)
    b.give(b.op("MatMul", b.op("Relu", wide), b.op("Transpose", b.w("B", 23, 24), perm=[1, 0])))
    save(b.model(), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode="row", row_min=24))
    reasons = {weight.name: weight.reason for weight in plan.weights}
    assert reasons["A"] is None
    assert "(MatMul) multiplies by 24 x 23, and --row-min is 24" in (reasons["B"] or "")
