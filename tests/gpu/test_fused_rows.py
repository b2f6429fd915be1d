"""Fused operators on a real GPU have the numbers of the model, eager and replayed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from splitc.runtime import Session
from splitc.runtime.hardware.gpus import list_gpus
from tests.compiler.lowering.test_fused_rows import BODIES, engine, feeds_of, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not list_gpus(), reason="needs a GPU")]


@pytest.mark.parametrize("form", BODIES)
@pytest.mark.parametrize("columns", [96, 2056])
def test_groups_have_the_models_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, columns: int
) -> None:
    if columns != 96 and "rotary" in form:
        pytest.skip("heads have other sizes")
    package = engine(BODIES[form][0], tmp_path, monkeypatch, columns)
    expected = run(tmp_path / "model.onnx")
    with Session(package) as session:
        for _ in range(5):
            (got,) = session.run(feeds_of(tmp_path / "model.onnx")).values()
            np.testing.assert_allclose(got.astype(np.float32), expected, atol=4e-3, rtol=4e-3)
        assert session.metrics.replayed > 0
        assert not session.notes
