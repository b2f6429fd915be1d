"""The engines' own memory."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime as ort
import pytest

from models.writer import save
from splitc.compiler import Request, plan_model
from splitc.compiler.planning.assembly import CPU_ENGINE, FOR_ONE_CPU, engine_bytes
from splitc.runtime.engines.kinds import ONNXRUNTIME
from splitc.runtime.errors import DoesNotFitError
from splitc.runtime.hardware.devices import parse_devices
from tests.helpers.blocks import Block


def test_ranks_share_as_much_memory_as_they_exchange() -> None:
    """Processes touch only the part of the shared memory for sums that they write, up to a limit."""
    devices = parse_devices(["3xcpu"])
    alone, small, large = (
        engine_bytes(devices[0], devices, ONNXRUNTIME, crossing=sums) for sums in ([], [1000, 24], [1 << 30])
    )
    assert small - alone == 2 * CPU_ENGINE.sum + 3 * 1024
    assert large - alone == CPU_ENGINE.sum + 3 * CPU_ENGINE.met


def test_plans_fit_even_where_predictions_are_off(decoder: Path) -> None:
    """A budget of exactly the memory of weights, values and engines is refused."""
    plan = plan_model(decoder, ["cpu0"], Request(memory=["1GiB"]))
    memory = plan.ranks[0].memory
    margin = int(memory.values * CPU_ENGINE.error)
    assert margin > 0
    plan_model(decoder, ["cpu0"], Request(memory=[str(memory.total)]))
    with pytest.raises(DoesNotFitError):
        plan_model(decoder, ["cpu0"], Request(memory=[str(memory.total - margin)]))


def test_files_that_were_optimized_for_one_cpu_are_said(tmp_path: Path) -> None:
    b = Block()
    image = b.op("Conv", b.data("x", (1, 16, 8, 8), ["n", 16, 8, 8]), b.w("A", 32, 16, 3, 3))
    b.give(b.op("Conv", image, b.w("B", 16, 32, 3, 3)), shape=["n", 16, 4, 4])
    save(b.model(), tmp_path / "model.onnx")
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3  # it warns of such files too
    ort.InferenceSession(tmp_path / "model.onnx", options)
    if not any(node.domain == FOR_ONE_CPU for node in onnx.load(tmp_path / "optimized.onnx").graph.node):
        pytest.skip("this CPU has no blocks of channels")
    said = [plan_model(tmp_path / f"{name}.onnx", "cpu0").warnings for name in ("model", "optimized")]
    assert not said[0]
    assert "optimized this file for one machine's CPU (com.microsoft.nchwc)" in said[1][0]
