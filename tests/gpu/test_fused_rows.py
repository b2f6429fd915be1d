"""Fused operators on a real GPU have the numbers of the model, eager and replayed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from splitc.runtime import Session
from splitc.runtime.hardware.gpus import list_gpus
from tests.compiler.engine_graphs.test_fused_rows import BODIES, engine, feeds_of, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not list_gpus(), reason="needs a GPU")]


@pytest.mark.parametrize("form", BODIES)
@pytest.mark.parametrize("columns", [96, 2056])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 4e-3), ("bfloat16", 2e-2)])
def test_groups_have_the_models_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, columns: int, dtype: str, tolerance: float
) -> None:
    """ONNX Runtime has no operators of bfloat16 on CPUs, so the model in float32 is the reference."""
    if columns != 96 and "rotary" in form:
        pytest.skip("heads have other sizes")
    for name in ("reference", "own"):
        (tmp_path / name).mkdir()
    engine(BODIES[form][0], tmp_path / "reference", monkeypatch, columns, "float")
    package = engine(BODIES[form][0], tmp_path / "own", monkeypatch, columns, dtype)
    expected = run(tmp_path / "reference/model.onnx")
    with Session(package) as session:
        for _ in range(5):
            (got,) = session.run(feeds_of(tmp_path / "own/model.onnx")).values()
            assert np.abs(got.astype(np.float32) - expected).max() < tolerance * np.abs(expected).max()
        assert session.metrics.replayed > 0
        assert not session.notes
