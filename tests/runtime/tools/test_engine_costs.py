"""An engine's time on a GPU: its replay's, if it has one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from models.writer import save
from splitc.runtime.errors import EngineError
from splitc.runtime.hardware.devices import Device
from splitc.runtime.tools.engine_costs import replay_seconds
from tests.helpers.blocks import Block
from tests.helpers.fake_gpus import FakeBackend


def test_a_replay_is_timed_where_work_can_be_captured(gpus: None, tmp_path: Path) -> None:
    block = Block()
    block.give(block.op("Neg", block.data("x", (6, 8), ["n", 8])), shape=["n", 8])
    save(block.model(), tmp_path / "model.onnx")
    gpu = FakeBackend(Device("cuda", 0))
    gpu.attach()
    engine = gpu.load(tmp_path / "model.onnx")
    seconds = replay_seconds(gpu, partial(engine.run, {"x": gpu.upload(np.ones((6, 8), np.float32))}))
    assert seconds is not None and 0 < seconds < 10

    def fail() -> Any:
        raise EngineError("it can't be captured")

    assert replay_seconds(gpu, fail) is None
    gpu.detach()
