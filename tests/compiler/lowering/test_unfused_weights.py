"""Dequantized weights are fused with products in the ranks' graphs where they are in the model, and nowhere else."""

from __future__ import annotations

from pathlib import Path

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


@pytest.mark.parametrize("ranks", [2, 8])
def test_dequantized_weight_that_stages_share_is_multiplied_as_in_the_model(ranks: int, tmp_path: Path) -> None:
    """In the last case each stage has one reader of it."""
    b = with_matrices(shared=True)
    save(b.model(), tmp_path / "model.onnx")
    request = Request(split_mode="layer", memory=["1GiB"], tensor_split=[1] * ranks)
    plan = plan_model(tmp_path / "model.onnx", [f"{ranks}xcpu"], request)
    manifest = compile_model(plan, tmp_path / "package")
    with Session(tmp_path / "package") as session:
        assert_close(session.run(b.feeds), run_whole(tmp_path / "model.onnx", b.feeds), 1e-6)
    assert manifest.number_type == "float32"


def test_outputs_are_compared_as_closely_as_the_model_computes(tmp_path: Path) -> None:
    """A model that quantizes nothing that it computes is compared as one of floats."""
    kinds = {}
    for shared in (True, False):
        save(with_matrices(shared).model(), tmp_path / "model.onnx")
        plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode="layer", memory=["1GiB"]))
        kinds[shared] = compile_model(plan, tmp_path / "package", force=True, verify=False).number_type
    assert kinds == {True: "float32", False: "int8"}
