"""Gates by Gelu become one operator in engines for GPUs, and give the same numbers on CPU devices."""

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

SIZE, INNER = 16, 1280
SPLIT = "p = MatMul (x, up)  q = Add (p, bias)  left, right = Split <axis = -1, num_outputs = 2> (q)"
TWO = "p = MatMul (x, one)  left = Add (p, first)  q = MatMul (x, other)  right = Add (second, q)"
SLICES = """
    p = MatMul (x, up)  q = Add (p, bias)  sizes = Shape (q)  number = Gather (sizes, end)  middle = Div (number, two)
    left = Slice (q, zero, middle, end)  right = Slice (q, middle, number, end)
"""
QUARTERS = SLICES.replace("(number, two)", "(number, four)  third = Mul (middle, two)").replace(
    "number, end)", "third, end)"
)
ERF = "d = Div (right, root)  e = Erf (d)  f = Add (e, unit)  g = Mul (right, f)  gate = Mul (g, half)"
FUSED = "splitc.on.gpu.BiasSplitGelu"


def written(halves: str, gate: str = "gate = Gelu (right)", inner: int = INNER, dtype: str = "float16") -> str:
    """The model's text. Its weights follow from their names: see `save`."""
    types = f"{dtype}[{SIZE}, {2 * inner}] up, {dtype}[{2 * inner}] bias, {dtype}[{inner}, {SIZE}] down"
    types += f", {dtype}[{SIZE}, {inner}] one, {dtype}[{SIZE}, {inner}] other"
    types += f", {dtype}[{inner}] first, {dtype}[{inner}] second, {dtype} root, {dtype} unit, {dtype} half"
    types += ", int64[1] end, int64[1] two, int64[1] four, int64[1] zero, int64[1] start, int64[1] stop"
    head = f"m ({dtype}[batch, length, {SIZE}] x) => ({dtype}[batch, length, {SIZE}] y) <{types}>"
    body = f"{halves}  {gate}  product = Mul (gate, left)  y = MatMul (product, down)"
    return f'<ir_version: 9, opset_import: ["" : 20]> {head} {{ {body} }}'


def save(text: str, path: Path) -> None:
    model = onnx.parser.parse_model(text)
    random, numbers = (
        np.random.default_rng(0),
        {
            "root": 2**0.5,
            "unit": 1.0,
            "half": 0.5,
            "end": [-1],
            "two": [2],
            "four": [4],
            "zero": [0],
            "start": [640],
            "stop": [1920],
        },
    )
    read = {name for node in model.graph.node for name in node.input}
    described = list(model.graph.value_info)
    del model.graph.value_info[:]
    for value in described:
        if value.name in read:
            shape = [dimension.dim_value for dimension in value.type.tensor_type.shape.dim]
            array = np.array(numbers.get(value.name, random.standard_normal(shape) / 4))
            kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            model.graph.initializer.append(numpy_helper.from_array(array.astype(kind), value.name))
    onnx.save(model, path)


def engine(text: str, folder: Path, **options: Any) -> list[str]:
    save(text, folder / "model.onnx")
    request = Request(split_mode="layer", shapes={"x": (2, 3, SIZE)}, **options)
    compile_model(plan_model(folder / "model.onnx", ["cuda0"], request), folder / "package", verify=False)
    return operators(ir.load(folder / "package/rank0/stage0.onnx").graph)


@pytest.mark.parametrize("gate", ["gate = Gelu (right)", ERF], ids=["operator", "decomposed"])
@pytest.mark.parametrize("halves", [SPLIT, SLICES, TWO], ids=["a Split", "Slices", "two products"])
def test_each_form_is_one_operator(tmp_path: Path, halves: str, gate: str) -> None:
    assert engine(written(halves, gate), tmp_path) == ["MatMul", FUSED, "MatMul"]
    inputs = {"x": np.random.default_rng(1).standard_normal((3, 5, SIZE)).astype(np.float16)}
    with Session(tmp_path / "package", devices=["cpu0"]) as session:
        outputs = session.run(inputs)["y"].astype(np.float32)
    expected = run_whole(tmp_path / "model.onnx", inputs)["y"].astype(np.float32)
    np.testing.assert_allclose(outputs, expected, rtol=0, atol=2e-3 * np.abs(expected).max())


@pytest.mark.parametrize(
    "text",
    [
        written(SPLIT, inner=1024),
        written(SPLIT, dtype="float"),
        written(SPLIT, 'gate = Gelu <approximate = "tanh"> (right)'),
        written(SPLIT.replace("left, right", "right, left")),
        written(SPLIT, "gate = Gelu (right)  again = Gelu (q)  z = ReduceMax (again)").replace(
            "(gate, left)", "(gate, z)"
        ),
        written(SLICES.replace("(q, middle, number", "(q, start, stop")),
        written(QUARTERS, inner=2 * INNER).replace(f"[{2 * INNER}, {SIZE}] down", f"[{INNER}, {SIZE}] down"),
        written(TWO.replace("MatMul (x, other)", "MatMul (r, other)").replace("p =", "r = Neg (x)  p =")),
    ],
    ids=[
        "another width",
        "single precision",
        "another function",
        "the first half",
        "read twice",
        "other columns",
        "half of the columns",
        "of other data",
    ],
)
def test_others_stay(tmp_path: Path, text: str) -> None:
    assert FUSED not in engine(text, tmp_path)


def test_nothing_is_fused_without_fusion(tmp_path: Path) -> None:
    assert FUSED not in engine(written(SPLIT), tmp_path, no_fuse=True)
