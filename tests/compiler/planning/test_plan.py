"""The representation of a plan in Python."""

from __future__ import annotations

from pathlib import Path

import splitc
import splitc.compiler
import splitc.runtime
from splitc.compiler import plan_model
from splitc.runtime.version import VERSION
from tests.conftest import LAYER


def test_a_plan_is_short_to_look_at(decoder: Path) -> None:
    plan = plan_model(decoder, "3xcpu", LAYER)
    assert repr(plan).startswith("<Plan of decoder.onnx: layer mode on cpu0, cpu1, cpu2, ")
    title, columns, *ranks = str(plan).splitlines()
    assert title in repr(plan) and columns.split()[0] == "rank"
    assert [line.split()[:2] for line in ranks] == [["0", "cpu0"], ["1", "cpu1"], ["2", "cpu2"]]
    assert plan._repr_html_().count("<tr>") == 1 + len(plan.ranks)


def test_public_names_are_listed() -> None:
    assert splitc.__version__ == VERSION
    assert "Session" in dir(splitc.runtime) and "plan_model" in dir(splitc.compiler)
    for package in (splitc.runtime, splitc.compiler):
        assert dir(package) == sorted(package.__all__)
        assert all(getattr(package, name) is not None for name in package.__all__)
