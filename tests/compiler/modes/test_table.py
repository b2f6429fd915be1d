"""A split mode is a module with a `MODE`, and a line in the table; no other module lists the modes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.modes import table, tensor
from splitc.compiler.modes.replanning import plan_from_file
from splitc.compiler.planning.plan_file import write_plan
from splitc.compiler.show.plan_tables import print_plan
from splitc.runtime import MisuseError, Session
from splitc.runtime.cli.tables import print_manifest
from splitc.runtime.package.manifest_file import read_manifest
from tests.conftest import assert_close, decoder_feeds, run_whole


def test_every_mode_has_its_module() -> None:
    assert all(table.find_mode(name) is not None for name in table.MODES)
    assert all(f"{name}: {what}." in table.describe_modes() for name, what in table.MODES.items())
    with pytest.raises(MisuseError, match="unknown split mode 'rows': there are layer, tensor, batch, row"):
        table.find_mode("rows")


def test_a_new_mode_is_planned_written_shown_and_run(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tensor mode under another name, always with one stage."""
    module = ModuleType("splitc.compiler.modes.mirrored")
    module.MODE = replace(tensor.MODE, stages=lambda request, devices: 1)  # type: ignore[attr-defined]  # is made here
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(table.MODES, "mirrored", "as tensor mode does it")
    plan = plan_model(decoder, ["2xcpu"], Request(split_mode="mirrored", tensor_split=[3, 1]))
    write_plan(plan, tmp_path / "plan.json")
    again = plan_from_file(decoder, tmp_path / "plan.json")
    assert [rank.memory for rank in again.ranks] == [rank.memory for rank in plan.ranks]
    compile_model(again, tmp_path / "package", verify=False)
    with Session(tmp_path / "package") as session:
        assert_close(session.run(decoder_feeds()), run_whole(decoder, decoder_feeds()))
    print_plan(plan)
    print_manifest(read_manifest(tmp_path / "package"), {})
    shown = capsys.readouterr().out
    assert "exchanges, " in shown and "mirrored mode, 2 ranks" in shown
    compared = plan_model(decoder, ["2xcpu"], Request(objective="latency"))
    assert "mirrored on 2" in [each.name for each in compared.alternatives]
