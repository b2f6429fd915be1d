"""The self check also runs the engines with slots, with a random adapter."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.adapters.slots import is_slot_sum, need_slots
from splitc.compiler.packaging import written_rank
from splitc.runtime import OutputsDifferError

COMPARED = "; with a random adapter, "


@pytest.mark.parametrize(("mode", "slots"), [("layer", 2), ("tensor", 2), ("row", 2), ("batch", 2), ("tensor", None)])
def test_engines_with_slots_are_compared(decoder: Path, tmp_path: Path, mode: str, slots: int | None) -> None:
    """In every mode, since operators are fused."""
    said: list[str] = []
    request = Request(split_mode=mode, lora_slots=slots)
    if mode == "row":
        request = replace(request, row_min=32)
    compile_model(plan_model(decoder, "2xcpu", request), tmp_path / "package", say=said.append)
    compared = [line for line in said if COMPARED in line]
    assert len(compared) == (slots is not None)
    for line in compared:
        plain, adapted = line.split(COMPARED)
        assert all("agree with the unsplit model on cpu0 (largest error" in part for part in (plain, adapted))


def test_a_fault_of_slots_is_found(decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the engines without slots are right."""

    def subtract(graph: ir.Graph, inputs: Collection[str]) -> None:
        need_slots(graph, inputs)
        for node in filter(is_slot_sum, graph):
            node.op_type = "Sub"

    monkeypatch.setattr(written_rank, "need_slots", subtract)
    plan = plan_model(decoder, "2xcpu", Request(split_mode="tensor", lora_slots=2))
    with pytest.raises(OutputsDifferError, match="outputs of the split model"):
        compile_model(plan, tmp_path / "package")
    assert not (tmp_path / "package").exists()
    compile_model(plan, tmp_path / "package", verify=False)
