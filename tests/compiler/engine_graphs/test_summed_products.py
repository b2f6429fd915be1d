"""Products of joined columns become sums of products in engines for GPUs, with the same numbers on CPU devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from tests.conftest import run_whole
from tests.helpers.written_attention import operators

ROWS, WIDTHS, COLUMNS = 2048, (4, 20), 8
JOINED = "a = Relu (x)  b = Neg (z)  c = Concat <axis = -1> (a, b)  p = MatMul (c, w)  y = Abs (p)"
# As torch's newer exporter writes a linear layer.
TURNED = JOINED.replace("p = MatMul (c, w)", "t = Transpose <perm = [1, 0]> (turned)  p = MatMul (c, t)")


def engine(body: str, folder: Path, dtype: str = "float16", rows: int = ROWS, **options: Any) -> list[str]:
    """The operators of the engine for one GPU."""
    one, other = (f"{dtype}[batch, rows, {width}]" for width in WIDTHS)
    head = f"m ({one} x, {other} z) => ({dtype}[batch, rows, columns] y)"
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> {head} {{ {body} }}')
    random = np.random.default_rng(0)
    kind = np.float16 if dtype == "float16" else np.float32
    for name, columns in (("w", COLUMNS), ("wide", 2 * sum(WIDTHS))):
        if f" {name})" in body:
            weight = random.standard_normal((sum(WIDTHS), columns)).astype(kind)
            model.graph.initializer.append(numpy_helper.from_array(weight, name))
    if "(turned)" in body:
        weight = random.standard_normal((COLUMNS, sum(WIDTHS))).astype(kind)
        model.graph.initializer.append(numpy_helper.from_array(weight, "turned"))
    onnx.save(model, folder / "model.onnx")
    shapes = {name: (1, rows, width) for name, width in zip("xz", WIDTHS, strict=True)}
    plan = plan_model(folder / "model.onnx", ["cuda0"], Request(split_mode="layer", shapes=shapes, **options))
    compile_model(plan, folder / "package")
    return operators(ir.load(folder / "package/rank0/stage0.onnx").graph)


@pytest.mark.parametrize(("body", "product"), [(JOINED, "MatMul"), (TURNED, "com.microsoft.FusedMatMul")])
def test_the_sum_has_the_products_numbers(tmp_path: Path, body: str, product: str) -> None:
    made = engine(body, tmp_path)
    assert sorted(made) == sorted(["Abs", "Add", product, product, "Neg", "Relu"])
    random = np.random.default_rng(1)
    inputs = {
        name: random.standard_normal((2, 3, width)).astype(np.float16) for name, width in zip("xz", WIDTHS, strict=True)
    }
    with Session(tmp_path / "package", devices=["cpu0"]) as session:
        outputs = session.run(inputs)["y"].astype(np.float32)
    expected = run_whole(tmp_path / "model.onnx", inputs)["y"].astype(np.float32)
    np.testing.assert_allclose(outputs, expected, rtol=0, atol=2e-3 * expected.max())


@pytest.mark.parametrize(
    ("body", "options"),
    [
        (JOINED, {"rows": ROWS - 1}),
        (JOINED, {"dtype": "float"}),
        (JOINED, {"no_fuse": True}),
        (  # the shape of a part is not known
            "a = Relu (x)  n = Constant <value_int = 0> ()  s = SplitToSequence (z)  b = SequenceAt (s, n)"
            "  c = Concat <axis = -1> (a, b)  p = MatMul (c, w)  y = Abs (p)",
            {},
        ),
        (JOINED.replace("(c, w)", "(c, wide)"), {}),
        (JOINED.replace("Abs (p)", "Add (p, m)").replace("p =", "m = ReduceMax (c)  p ="), {}),
    ],
    ids=["few rows", "single precision", "without fusion", "a part of unknown shape", "many columns", "read twice"],
)
def test_others_stay(tmp_path: Path, body: str, options: dict[str, Any]) -> None:
    assert engine(body, tmp_path, **options).count("MatMul") == 1
