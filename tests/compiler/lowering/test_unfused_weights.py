"""Dequantized weights are fused with products in the ranks' graphs where they are in the model, and nowhere else."""

from __future__ import annotations

from pathlib import Path

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


def test_outputs_are_compared_as_closely_as_the_model_computes(tmp_path: Path) -> None:
    """A model that quantizes nothing that it computes is compared as one of floats."""
    kinds = {}
    for shared in (True, False):
        save(with_matrices(shared).model(), tmp_path / "model.onnx")
        plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode="layer", memory=["1GiB"]))
        kinds[shared] = compile_model(plan, tmp_path / "package", force=True, verify=False).number_type
    assert kinds == {True: "float32", False: "int8"}
