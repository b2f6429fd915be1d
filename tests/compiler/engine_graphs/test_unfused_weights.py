"""Dequantized weights are fused with products in the ranks' graphs where they are in the model, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from tests.conftest import assert_close, run_whole
from tests.helpers.blocks import Block
from tests.helpers.operators import number, stored

WIDTH = 32


def unpacked(b: Block, name: str) -> ir.Value:
    """A matrix in 8 bits. A product that is its only reader is fused with it, and then quantizes what it multiplies."""
    scales = b.op("Add", b.op("Abs", b.w(f"{name}.scales", WIDTH)), number(b, 0.01))
    return b.op("DequantizeLinear", stored(b, name, WIDTH, WIDTH), b.op("Mul", scales, number(b, 0.003)), axis=1)


def with_matrices(shared: bool) -> Block:
    """Eight products with matrices of 8 bits: all with the same one, or each with its own."""
    b = Block(opset=18)
    x = b.data("x", (4, WIDTH), ["n", WIDTH])
    matrices = [unpacked(b, "A")] * 8 if shared else [unpacked(b, f"A{place}") for place in range(8)]
    for matrix in matrices:
        x = b.op("Tanh", b.op("MatMul", x, matrix))
    b.give(x, shape=["n", WIDTH])
    return b


def with_one_scale(turned: bool) -> Block:
    """Eight products with matrices of their own, whose scales are one number each, and the same."""
    b = Block(opset=18)
    x = b.data("x", (4, WIDTH), ["n", WIDTH])
    for place in range(8):
        matrix, scale = stored(b, f"A{place}", WIDTH, WIDTH), b.weight(f"scale {place}", ir.tensor(np.float32(0.003)))
        if turned:
            matrix = b.op("Transpose", matrix, perm=[1, 0])
        x = b.op("Tanh", b.op("MatMul", x, b.op("DequantizeLinear", matrix, scale)))
    b.give(x, shape=["n", WIDTH])
    return b


@pytest.mark.parametrize(
    ("b", "ranks"),
    [(with_matrices(True), 2), (with_matrices(True), 8), (with_one_scale(False), 8), (with_one_scale(True), 8)],
)
def test_dequantized_weight_that_stages_share_is_multiplied_as_in_the_model(
    b: Block, ranks: int, tmp_path: Path
) -> None:
    """They share it, or its scale. With eight, each stage has one reader of it."""
    save(b.model(), tmp_path / "model.onnx")
    request = Request(split_mode="layer", memory=["1GiB"], tensor_split=[1] * ranks)
    plan = plan_model(tmp_path / "model.onnx", [f"{ranks}xcpu"], request)
    manifest = compile_model(plan, tmp_path / "package", verify=False)
    with Session(tmp_path / "package") as session:
        assert_close(session.run(b.feeds), run_whole(tmp_path / "model.onnx", b.feeds), 1e-6)
    assert manifest.number_type == "float32"


def test_product_of_what_was_quantized_is_of_the_same_numbers_on_each_rank(tmp_path: Path) -> None:
    """The model multiplies what was quantized. A rank that gets it dequantized would quantize it again, less finely."""
    b = Block(opset=18)
    quantized = b.ops("DynamicQuantizeLinear", b.data("x", (4, WIDTH), ["n", WIDTH]), outputs=3)
    x = b.op("DequantizeLinear", *quantized)
    products = [b.op("Tanh", b.op("MatMul", x, unpacked(b, f"A{place}"))) for place in range(4)]
    b.give(b.op("Sum", *products), shape=["n", WIDTH])
    save(b.model(), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode="row", memory=["1GiB"], row_min=8))
    compile_model(plan, tmp_path / "package", verify=False)
    with Session(tmp_path / "package") as session:
        assert_close(session.run(b.feeds), run_whole(tmp_path / "model.onnx", b.feeds), 1e-5)


def with_clipped_products(quantized: bool) -> Block:
    """Three products with matrices of 8 bits, which the model leaves in floats: they are clipped, or also quantized."""
    b = Block(opset=18)
    x = b.data("x", (4, WIDTH), ["n", WIDTH])
    for place in range(3):
        x = b.op("Relu", b.op("MatMul", x, unpacked(b, f"A{place}")))
        if quantized:
            scale = b.weight(f"step {place}", ir.tensor(np.float32(0.04 + place / 100)))
            zero = b.constant(np.uint8(3), np.uint8)
            x = b.op("DequantizeLinear", b.op("QuantizeLinear", x, scale, zero), scale, zero)
    b.give(b.op("MatMul", x, b.w("B", WIDTH, WIDTH)), shape=["n", WIDTH])
    return b


def with_turned_matrices() -> Block:
    """Products of what was quantized, with matrices that are dequantized, then transposed, as torch stores them."""
    b = Block(opset=18)
    x = b.data("x", (4, WIDTH), ["n", WIDTH])
    zero = b.constant(np.uint8(128), np.uint8)
    for place in range(3):
        scale, own = (b.weight(f"{name} {place}", ir.tensor(np.float32(0.003 + place / 999))) for name in ("step", "s"))
        x = b.op("DequantizeLinear", b.op("QuantizeLinear", x, scale, zero), scale, zero)
        matrix = b.op("Transpose", b.op("DequantizeLinear", stored(b, f"A{place}", WIDTH, WIDTH), own), perm=[1, 0])
        x = b.op("Sigmoid", b.op("MatMul", b.op("MatMul", x, matrix), b.w(f"B{place}", WIDTH, WIDTH)))
    b.give(x, shape=["n", WIDTH])
    return b


@pytest.mark.parametrize(
    "mode", [{"split_mode": "layer"}, {"split_mode": "row", "row_min": 8}, {"split_mode": "tensor"}]
)
@pytest.mark.parametrize(
    "build", [partial(with_clipped_products, False), partial(with_clipped_products, True), with_turned_matrices]
)
def test_product_that_the_model_leaves_in_floats_is_left_so_at_a_border(
    build: Callable[[], Block], mode: dict[str, Any], tmp_path: Path
) -> None:
    """Between it and what keeps it in floats, ranks exchange values, or an engine ends."""
    b = build()
    save(b.model(), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["3xcpu"], Request(memory=["1GiB"], **mode))
    compile_model(plan, tmp_path / "package", verify=False)
    with Session(tmp_path / "package") as session:
        assert_close(session.run(b.feeds), run_whole(tmp_path / "model.onnx", b.feeds), 1e-5)


def test_outputs_are_compared_as_closely_as_the_model_computes(tmp_path: Path) -> None:
    """A model that quantizes nothing that it computes is compared as one of floats."""
    kinds = {}
    for shared in (True, False):
        save(with_matrices(shared).model(), tmp_path / "model.onnx")
        plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode="layer", memory=["1GiB"]))
        kinds[shared] = compile_model(plan, tmp_path / "package", force=True, verify=False).number_type
    assert kinds == {True: "float32", False: "int8"}


def test_output_of_an_engine_is_not_quantized_because_a_reader_is(tmp_path: Path) -> None:
    """Residual blocks on transposed rows: the sum crosses from stage to stage, and what is quantized of it too."""
    b = Block(opset=18)
    x = b.data("x", (2, 4, 64), ["n", 4, 64])
    zero = b.constant(np.uint8(128), np.uint8)
    for place in range(4):
        scale, own = (b.weight(f"{name} {place}", ir.tensor(np.float32(0.03 + place / 99))) for name in ("step", "s"))
        turned = b.op("Transpose", x, perm=[1, 0, 2])
        h = b.op("DequantizeLinear", b.op("QuantizeLinear", turned, scale, zero), scale, zero)
        matrix = b.op("DequantizeLinear", stored(b, f"A{place}", 64, 64), b.op("Mul", own, number(b, 0.05)))
        h = b.op("Transpose", b.op("Relu", b.op("MatMul", h, matrix)), perm=[1, 0, 2])
        x = b.op("Add", x, h)
    b.give(b.op("MatMul", x, b.w("B", 64, 24)), shape=["n", 4, 24])
    save(b.model(), tmp_path / "model.onnx")
    request = Request(split_mode="layer", memory=["1GiB"])
    compile_model(plan_model(tmp_path / "model.onnx", ["3xcpu"], request), tmp_path / "package")
    with Session(tmp_path / "package") as session:
        assert_close(session.run(b.feeds), run_whole(tmp_path / "model.onnx", b.feeds), 1e-5)
