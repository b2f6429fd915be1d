"""The part of a request that is computed on the host, before its engines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from models.writer import Writer, save
from splitc.runtime.arrays.array import Array
from splitc.runtime.package.states import Length, Preamble
from splitc.runtime.requests import preamble
from splitc.runtime.requests.preamble import PreambleEngine, _Graph


def test_numbers_without_axes_get_none(tmp_path: Path) -> None:
    w = Writer()
    w.output(w.op("Neg", w.input("x", ir.DataType.FLOAT, [])), "y", ir.DataType.FLOAT, [])
    save(w.model(), tmp_path / "before.onnx")
    made = _Graph(tmp_path, "before.onnx").run({"x": np.array(2, np.float32)})["y"]
    assert made.shape == () and made == -2


def test_caches_of_several_lengths_take_the_graph_with_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    class Graph:
        def __init__(self, package: Path, file: str) -> None:
            self._file = file

        def run(self, feeds: object) -> dict[str, Array]:
            ran.append(self._file)
            return {}

    monkeypatch.setattr(preamble, "_Graph", Graph)
    lengths = [Length(name, [f"{name}.past"], 2, adds=1) for name in "ab"]
    engine = PreambleEngine(Path(), Preamble("whole", ["ones"], [], plain="plain", ones=["ones"]), lengths)
    for others in (3, 5):
        filled = {"a": np.zeros((3, 0), bool), "b": np.zeros((others, 0), bool)}
        engine.apply({**filled, "ones": np.ones((1, 4), np.int64)})
    assert ran == ["plain", "whole"]
