"""A bias and a Gelu become one operator in engines for GPUs, in whichever form, and give the same numbers."""

from __future__ import annotations

from pathlib import Path

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

SIZE = 8
ERF = "d = {scaled}  e = Erf (d)  f = Add ({sum})"
FORMS = {
    "operator": "g = Gelu (q)",
    "of ONNX Runtime": "g = com.microsoft.Gelu (q)",
    "halved last": ERF.format(scaled="Div (q, root)", sum="e, one") + "  h = Mul (q, f)  g = Mul (h, half)",
    "halved second": ERF.format(scaled="Mul (q, turned)", sum="one, e") + "  h = Mul (f, half)  g = Mul (h, q)",
    "halved before": ERF.format(scaled="Div (q, root)", sum="e, one") + "  h = Mul (q, half)  g = Mul (h, f)",
}


def written(form: str, dtype: str = "float16") -> onnx.ModelProto:
    body = f"p = MatMul (x, up)  q = Add (p, bias)  {form}  y = MatMul (g, down)"
    head = f"m ({dtype}[batch, length, {SIZE}] x) => ({dtype}[batch, length, {SIZE}] y)"
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 20, "com.microsoft" : 1]> {head} {{ {body} }}'
    )
    random = np.random.default_rng(0)
    weights: dict[str, np.ndarray] = {
        "up": random.standard_normal((SIZE, 4 * SIZE)) / 3,
        "bias": random.standard_normal(4 * SIZE),
        "down": random.standard_normal((4 * SIZE, SIZE)) / 6,
        "root": np.array(2**0.5),
        "turned": np.array(0.5**0.5),
        "one": np.array(1.0),
        "half": np.array(0.5),
    }
    for name, array in weights.items():
        kind = np.float16 if dtype == "float16" else np.float32
        if f" {name}" in body or f"({name}" in body:
            model.graph.initializer.append(numpy_helper.from_array(array.astype(kind), name))
    return model


def engine(model: onnx.ModelProto, folder: Path, device: str = "cuda0") -> tuple[Path, list[str]]:
    onnx.save(model, folder / "model.onnx")
    plan = plan_model(folder / "model.onnx", [device], Request(split_mode="layer", shapes={"x": (2, 16, SIZE)}))
    compile_model(plan, folder / "package", verify=False)
    return folder / "package", operators(ir.load(folder / "package/rank0/stage0.onnx").graph)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_each_form_is_one_operator(tmp_path: Path, form: str) -> None:
    package, made = engine(written(form), tmp_path)
    assert made == ["MatMul", "com.microsoft.BiasGelu", "MatMul"]
    inputs = {"x": np.random.default_rng(1).standard_normal((3, 5, SIZE)).astype(np.float16)}
    with Session(package, devices=["cpu0"]) as session:
        outputs = session.run(inputs)
    expected = run_whole(tmp_path / "model.onnx", inputs)
    np.testing.assert_allclose(outputs["y"].astype(np.float32), expected["y"].astype(np.float32), rtol=0, atol=1e-2)


def test_on_ranks_with_a_part_of_the_bias(tmp_path: Path) -> None:
    onnx.save(written(FORMS["halved last"]), tmp_path / "model.onnx")
    asked = Request(split_mode="tensor", shapes={"x": (2, 16, SIZE)}, spread=True)
    compile_model(plan_model(tmp_path / "model.onnx", ["cuda0", "cuda1"], asked), tmp_path / "package", verify=False)
    for rank in (0, 1):
        made = operators(ir.load(tmp_path / f"package/rank{rank}/stage0.onnx").graph)
        assert made[:3] == ["MatMul", "com.microsoft.BiasGelu", "MatMul"]
    inputs = {"x": np.random.default_rng(1).standard_normal((3, 5, SIZE)).astype(np.float16)}
    with Session(tmp_path / "package", devices=["cpu0", "cpu1"]) as session:
        outputs = session.run(inputs)
    expected = run_whole(tmp_path / "model.onnx", inputs)
    np.testing.assert_allclose(outputs["y"].astype(np.float32), expected["y"].astype(np.float32), rtol=0, atol=1e-2)


@pytest.mark.parametrize(
    ("model", "device"),
    [
        (written(FORMS["operator"]), "cpu0"),
        (written(FORMS["operator"], "float"), "cuda0"),
        (written('g = Gelu <approximate = "tanh"> (q)'), "cuda0"),
        (written(FORMS["halved last"].replace("(q, root)", "(q, half)")), "cuda0"),
        (written(FORMS["halved last"].replace("e, one", "e, half")), "cuda0"),
        (written(FORMS["halved last"].replace("(h, half)", "(h, one)")), "cuda0"),
        (written("r = Add (q, q)  g = Gelu (r)"), "cuda0"),
    ],
    ids=[
        "on a CPU device",
        "single precision",
        "another function",
        "another root",
        "another sum",
        "another half",
        "sum",
    ],
)
def test_other_forms_are_not_fused(tmp_path: Path, model: onnx.ModelProto, device: str) -> None:
    assert "com.microsoft.BiasGelu" not in engine(model, tmp_path, device)[1]
