"""What is computed of a request on the host, before its engines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from models.writer import Writer, save
from splitc.runtime.requests.preamble import _Graph


def test_numbers_without_axes_get_none(tmp_path: Path) -> None:
    w = Writer()
    w.output(w.op("Neg", w.input("x", ir.DataType.FLOAT, [])), "y", ir.DataType.FLOAT, [])
    save(w.model(), tmp_path / "before.onnx")
    made = _Graph(tmp_path, "before.onnx").run({"x": np.array(2, np.float32)})["y"]
    assert made.shape == () and made == -2
