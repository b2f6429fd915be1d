"""Wrong rules of several kinds: the trial of the node finds each, and outputs stay right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnx_ir as ir
import pytest

from models.llama import Size
from models.llama_fused import build as build_fused
from models.writer import save
from splitc.compiler import Plan, Request, plan_model
from splitc.compiler.inference.shapes import shape_of
from splitc.compiler.operators import registry
from splitc.compiler.operators.axes import Factor
from splitc.compiler.operators.operation import Operation
from splitc.compiler.operators.operator import AxesRule
from splitc.compiler.trials import by_rows, running, tiny, trial
from splitc.compiler.trials.forms import Form
from splitc.compiler.trials.running import try_forms
from splitc.compiler.trials.tiny import TinyModel, tiny_model
from splitc.runtime.errors import SplitcError
from splitc.runtime.files import cache
from splitc.runtime.files.cache import cache_file
from tests.helpers.blocks import FLOAT, Block, check_rows, check_split
from tests.helpers.operators import HIDDEN, INNER, softmax

KNOWN = dict(registry.REGISTRY)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def known_rule(name: str) -> AxesRule:
    rule = KNOWN[name].axes
    assert rule is not None
    return rule


def replace_rule(monkeypatch: pytest.MonkeyPatch, name: str, rule: AxesRule) -> None:
    monkeypatch.setattr(registry, "REGISTRY", {**KNOWN, name: replace(KNOWN[name], axes=rule)})


def broken_operators(plan: Plan) -> list[str]:
    return [warning.partition(" ")[0] for warning in plan.warnings if "please report it" in warning]


def all_axes_free(op: Operation) -> None:
    op.relate_all(op.input(0), op.output())


def linear_too(op: Operation) -> None:
    all_axes_free(op)
    op.linear = (frozenset({0}),)


def forgets_the_heads(op: Operation) -> None:
    known_rule("com.microsoft.MultiHeadAttention")(op)
    op.attributes.clear()


def beside_a_pair(build: Callable[[Block, ir.Value], ir.Value]) -> Block:
    """The node under test, followed by two products of C and D, which can always be split."""
    b = Block()
    x = softmax(b, b.data("x", (2, 5, HIDDEN), ["n", "t", HIDDEN]))
    x = softmax(b, build(b, x))
    b.give(softmax(b, b.op("MatMul", b.op("MatMul", x, b.w("C", HIDDEN, INNER)), b.w("D", INNER, HIDDEN))))
    return b


def pair(b: Block, x: ir.Value) -> ir.Value:
    return b.op("MatMul", b.op("Softmax", b.op("MatMul", x, b.w("A", HIDDEN, INNER))), b.w("B", INNER, HIDDEN))


def clipped(b: Block, x: ir.Value) -> ir.Value:
    return b.op("Relu", b.op("MatMul", b.op("MatMul", x, b.w("A", HIDDEN, INNER)), b.w("B", INNER, HIDDEN)))


def attention(b: Block, x: ir.Value) -> ir.Value:
    q, k, v = (b.op("MatMul", x, b.w(name, HIDDEN, INNER)) for name in ("Q", "K", "V"))
    return b.op("MatMul", b.op("com.microsoft.MultiHeadAttention", q, k, v, num_heads=4), b.w("B", INNER, HIDDEN))


def whole_thirds(b: Block, x: ir.Value) -> ir.Value:
    numbers = b.op("Cast", b.op("Mul", x, b.constant(30, np.float32)), to=ir.DataType.INT32)
    a, c = (b.weight(name, ir.tensor(b.random(name, *shape).round().astype(np.int32))) for name, shape in MATRICES)
    product = b.op("MatMul", b.op("MatMul", numbers, a), c)
    return b.op("Cast", b.op("Div", product, b.constant(3, np.int32)), to=FLOAT)


MATRICES = (("A", (HIDDEN, INNER)), ("B", (INNER, HIDDEN)))


def divides_parts(op: Operation) -> None:
    known_rule("Div")(op)
    op.linear = (frozenset({0}),)


# The operator, its wrong rule, and what has it.
WRONG: dict[str, tuple[str, AxesRule, Callable[[Block, ir.Value], ir.Value]]] = {
    "an axis that is needed whole": ("Softmax", all_axes_free, pair),
    "what is not linear": ("Relu", linear_too, clipped),
    "whole numbers that are rounded": ("Div", divides_parts, whole_thirds),
    "an attribute that counts": ("com.microsoft.MultiHeadAttention", forgets_the_heads, attention),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_rule_is_found_and_the_model_is_right(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, rule, build = WRONG[case]
    replace_rule(monkeypatch, name, rule)
    (plan,) = check_split(beside_a_pair(build), tmp_path, "CD", shares=((3, 1),))
    assert broken_operators(plan) == [name]


def test_right_rules_are_not_doubted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a few nodes are tried together, so that few are tried again because of one that does not run."""
    numbers: list[int] = []

    def count(forms: Sequence[Form], *others: Any) -> TinyModel:
        numbers.append(len(forms))
        return tiny_model(forms, *others)

    monkeypatch.setattr(running, "AT_ONCE", 3)
    monkeypatch.setattr(running, "tiny_model", count)
    (plan,) = check_split(beside_a_pair(attention), tmp_path, "QKVBCD", shares=((3, 1),))
    assert plan.warnings == () and max(numbers) == 3


def test_rules_are_tried_in_row_mode_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product whose rule takes the rows of its square matrix for the columns."""

    def rows_for_columns(op: Operation) -> None:
        if (matrix := op.node.inputs[1]) is None or matrix.name != "A":
            known_rule("MatMul")(op)
        else:
            op.relate(op.input(1)[0], op.output()[-1])

    def square(b: Block, x: ir.Value) -> ir.Value:
        return b.op("MatMul", x, b.w("A", HIDDEN, HIDDEN))

    replace_rule(monkeypatch, "MatMul", rows_for_columns)
    (plan,) = check_rows(beside_a_pair(square), tmp_path, "CD", shares=((1, 1),), whole="A")
    (matrix,) = (weight for weight in plan.weights if weight.name == "A")
    assert "it could not be tried" in (matrix.reason or "")


def test_results_are_kept_until_the_code_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model.onnx"
    save(beside_a_pair(attention).model(), model)
    tried: list[int] = []

    def count(forms: Sequence[Form], *others: Any) -> dict[str, str]:
        tried.append(len(forms))
        return try_forms(forms, *others)

    def plan() -> None:
        plan_model(model, ["2xcpu"], Request(split_mode="tensor"))

    monkeypatch.setattr(trial, "try_forms", count)
    plan()
    plan()
    assert len(tried) == 1
    cache_file(trial.FILE).write_bytes(b"no JSON")
    plan()
    assert len(tried) == 2
    monkeypatch.setattr(trial, "_versions", lambda: "other code")
    plan()
    assert tried[1:] == [tried[0], tried[0]]


@pytest.mark.parametrize("why", ["is a file", "is full"])
def test_cache_that_cannot_be_written_is_done_without(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "is a file":
        (tmp_path / "cache").touch()
    else:

        def full(path: Path) -> NoReturn:
            raise SplitcError(f"can't write {path}: the disk is full")

        monkeypatch.setattr(cache, "written_whole", full)
    check_split(beside_a_pair(attention), tmp_path, "QKVBCD", shares=((1, 1),))


def test_sizes_of_a_weight_are_those_of_all_of_it(tmp_path: Path) -> None:
    """A Shape of a weight that is sharded."""
    b = Block()
    x = softmax(b, b.data("x", (2, 5, HIDDEN), ["n", "t", HIDDEN]))
    inner = b.op("MatMul", x, b.w("A", HIDDEN, INNER))
    width = b.op("Cast", b.op("Gather", b.op("Shape", b.w("A", HIDDEN, INNER)), b.constant(1, np.int64)), to=FLOAT)
    b.give(softmax(b, b.op("MatMul", b.op("Div", inner, width), b.w("B", INNER, HIDDEN))))
    check_split(b, tmp_path, "AB")


def test_tables_of_positions_are_tried_for_caches_of_any_length(tmp_path: Path) -> None:
    """Both have 32,768 rows here, of which a trial takes few: the table must still have one for each position."""
    size = Size(layers=1, hidden=256, heads=8, kv_heads=4, feed_forward=512, longest=1 << 15, dtype=ir.DataType.FLOAT16)
    save(build_fused(size), tmp_path / "model.onnx")
    shapes = {"input_ids": (1, 1), "attention_mask": (1, 1 << 15), "past_key_values.0.key": (1, 4, 1 << 15, 32)}
    plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode="tensor", shapes=shapes))
    assert plan.ranks[0].memory.cache >> 20 == 8, "half of the heads"


def test_slice_up_to_a_size_of_other_axes_is_tried(tmp_path: Path) -> None:
    """Attention with relative positions takes, of scores for all distances, as many as there are tokens."""
    b = Block()
    x = softmax(b, b.data("x", (2, 5, HIDDEN), ["n", "t", HIDDEN]))
    inner = b.op("MatMul", x, b.w("A", HIDDEN, INNER))
    length = b.op("Gather", b.op("Shape", x), b.constant([1], np.int64))
    zero, axis = (b.constant([number], np.int64) for number in (0, 1))
    first = b.op("Slice", b.op("Concat", b.op("Neg", inner), inner, axis=1), zero, length, axis)
    b.give(softmax(b, b.op("MatMul", b.op("Add", first, inner), b.w("B", INNER, HIDDEN))))
    (plan,) = check_split(b, tmp_path, "AB", shares=((3, 1),), sums=1)
    assert plan.warnings == ()


def test_many_small_axes_are_tried_with_few_elements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As windows of volumes have."""
    monkeypatch.setattr(tiny, "MOST_BYTES", 1 << 12)
    b = Block()
    shape = (*[2] * 9, HIDDEN)
    x = softmax(b, b.data("x", shape, ["n", *shape[1:]]))
    made = b.op("MatMul", b.op("Relu", b.op("MatMul", x, b.w("A", HIDDEN, INNER))), b.w("B", INNER, HIDDEN))
    b.give(softmax(b, made), shape=["n", *shape[1:]])
    check_split(b, tmp_path, "AB", shares=((3, 1),))


def test_large_kernels_of_large_images_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vision transformer's patches. Trials have smaller images, but the same kernels: attributes and padding fit."""
    kernels: set[tuple[int, ...]] = set()

    def recorded(*arguments: Any) -> TinyModel:
        made = tiny_model(*arguments)
        weights = [node.inputs[1] for node in made.nodes if node.op_type == "Conv"]
        kernels.update(shape_of(weight)[2:] for weight in weights)
        return made

    monkeypatch.setattr(running, "tiny_model", recorded)
    monkeypatch.setattr(tiny, "MOST_BYTES", 1 << 16)
    b = Block()
    image = b.data("x", (1, 3, 84, 84), ["n", 3, 84, 84])
    patches = b.op("Conv", image, b.w("P", INNER, 3, 14, 14), kernel_shape=[14, 14], strides=[14, 14])
    made = b.op("MatMul", b.op("Transpose", b.op("Relu", patches), perm=[0, 2, 3, 1]), b.w("B", INNER, HIDDEN))
    b.give(softmax(b, made), shape=["n", 6, 6, HIDDEN])
    check_split(b, tmp_path, "PB", shares=((3, 1),))
    assert kernels == {(14, 14)}


def test_nodes_of_bfloat16_are_tried(tmp_path: Path) -> None:
    """ONNX Runtime's CPU provider has no MatMul for them."""
    b = Block()
    x = b.op("Cast", softmax(b, b.data("x", (2, 5, HIDDEN), ["n", "t", HIDDEN])), to=ir.DataType.BFLOAT16)
    for name, rows, columns in (("A", HIDDEN, INNER), ("B", INNER, HIDDEN)):
        x = b.op("MatMul", x, b.op("Cast", b.w(name, rows, columns), to=ir.DataType.BFLOAT16))
    b.give(softmax(b, b.op("Cast", x, to=FLOAT)))
    save(b.model(), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode="tensor", shapes={"x": (2, 5, HIDDEN)}))
    assert {weight.name: weight.reason for weight in plan.weights} == {"A": None, "B": None}


def test_large_weights_are_not_read_to_try_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_rows, "MOST_ELEMENTS", 1 << 6)
    runs: list[Any] = []
    monkeypatch.setattr(by_rows, "run_alone", lambda *_: runs.append(1))
    rows, inner, columns = ((Factor(size),) for size in (4, 10, 100))
    weight = ir.Value(name="A", const_value=ir.tensor(np.ones((10, 100), np.float32)))
    node = ir.Node("", "MatMul", [ir.Value(name="x", type=ir.TensorType(FLOAT)), weight])
    operation = Operation(node, [(rows, inner), (inner, columns)], [(rows, columns)], [None, None])
    by_rows.holds_by_rows(operation, rows[0], {"x": (4, 10)}, {})
    assert not runs
