"""Experts, recognized by structure, in all forms that exporters write and in nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from models.writer import save
from splitc.compiler.analysis.facts import analyze
from splitc.compiler.placement.experts import find_experts
from splitc.compiler.request.shapes import AskedShapes
from tests.helpers.mixtures import (
    EXPERTS,
    FORMS,
    INNER,
    ROWS,
    WIDE,
    Mixture,
    attention,
    chosen_by,
    expert,
    normed,
    save_mixture,
)


def experts_of(model: Path) -> list[list[str]]:
    return [[weight.name or "" for weight in layer] for layer in find_experts(analyze(model, AskedShapes(), 1).costs)]


@pytest.mark.parametrize("form", FORMS)
def test_experts_of_each_layer(tmp_path: Path, form: str) -> None:
    """All experts, without the shared one, which every token passes, and without the router's weights."""
    numbers = [f"{number}." for number in range(EXPERTS)] if form in ("loop", "dense") else [""]
    layers = experts_of(save_mixture(tmp_path, form, 3))
    assert [sorted(layer) for layer in layers] == [
        sorted(f"layers.{layer}.mixture.{number}{part}" for number in numbers for part in ("first", "second"))
        for layer in range(3)
    ]


def save_layer(folder: Path, build: Callable[[Mixture, ir.Value], ir.Value]) -> Path:
    b = Mixture()
    x = b.op("Gather", b.w("table", ROWS, WIDE), b.indices("ids", [[1, 2, 3]], ["n", "t"]))
    h = b.op("Reshape", normed(b, x), b.ints(-1, WIDE))
    b.give(build(b, h), shape=["m", "k"])
    save(b.model(), folder / "model.onnx")
    return folder / "model.onnx"


def test_a_decoder_has_none(decoder: Path) -> None:
    assert experts_of(decoder) == []


def test_tokens_that_are_sampled_choose_no_experts(tmp_path: Path) -> None:
    """A TopK of a product's results, one row each, followed by products with weights."""

    def best(b: Mixture, h: ir.Value) -> ir.Value:
        shares, numbers = chosen_by(b, h, "sample")
        again = b.op("Gather", b.w("rows", 4, WIDE), numbers)
        weighed = b.op("ReduceSum", b.op("Mul", again, b.op("Unsqueeze", shares, b.ints(-1))), b.ints(1), keepdims=0)
        return b.op("MatMul", b.op("Tanh", b.op("MatMul", weighed, b.w("up", WIDE, 40))), b.w("down", 40, WIDE))

    assert experts_of(save_layer(tmp_path, best)) == []


def test_products_of_one_shape_that_no_router_chooses_are_none(tmp_path: Path) -> None:
    def plain(b: Mixture, h: ir.Value) -> ir.Value:
        return b.op("Sum", *(expert(b, h, "plain", number) for number in range(EXPERTS)))

    assert experts_of(save_layer(tmp_path, plain)) == []


def test_a_choice_among_groups_comes_before_that_of_experts(tmp_path: Path) -> None:
    """A router of four experts first chooses between two groups; the shared expert has two matrices."""

    def grouped(b: Mixture, h: ir.Value) -> ir.Value:
        scores = b.op("Sigmoid", b.op("MatMul", h, b.w("router", WIDE, EXPERTS)))
        groups = b.op("ReduceMax", b.op("Reshape", scores, b.ints(-1, 2, 2)), axes=[2], keepdims=0)
        best, _ = b.ops("TopK", groups, b.ints(1), outputs=2)
        allowed = b.op("Cast", b.op("GreaterOrEqual", groups, best), to=1)
        mask = b.op("Reshape", b.op("Expand", b.op("Unsqueeze", allowed, b.ints(2)), b.ints(1, 1, 2)), b.ints(-1, 4))
        shares, numbers = b.ops("TopK", b.op("Mul", scores, mask), b.ints(1), outputs=2)
        made = []
        for number in range(EXPERTS):
            chose = b.op("Cast", b.op("Equal", numbers, b.constant(number, np.int64)), to=1)
            made.append(b.op("Mul", expert(b, h, "own", number), b.op("Mul", shares, chose)))
        gate, up = b.w("shared.gate", WIDE, INNER), b.w("shared.up", WIDE, INNER)
        inner = b.op("Mul", b.op("Tanh", b.op("MatMul", h, gate)), b.op("MatMul", h, up))
        return b.op("Add", b.op("Sum", *made), b.op("MatMul", inner, b.w("shared.down", INNER, WIDE)))

    (layer,) = experts_of(save_layer(tmp_path, grouped))
    assert len(layer) == 2 * EXPERTS and all(name.startswith("own.") for name in layer)


def test_attention_by_a_chosen_head_is_no_mixture(tmp_path: Path) -> None:
    """Only nodes that depend on the choice alone count, not those after the paths join."""

    def after(b: Mixture, h: ir.Value) -> ir.Value:
        shares, _ = chosen_by(b, h, "gate")
        gated = b.op("Mul", h, b.op("ReduceSum", shares, b.ints(-1)))
        return b.op("Squeeze", attention(b, b.op("Unsqueeze", gated, b.ints(0)), "later"), b.ints(0))

    assert experts_of(save_layer(tmp_path, after)) == []
