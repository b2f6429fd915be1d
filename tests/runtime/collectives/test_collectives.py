"""Steps that ranks in processes do together: one rank does them, and tells the others."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from splitc.runtime.collectives import LOADING, Label
from splitc.runtime.collectives.collectives import Collectives
from splitc.runtime.errors import EngineError
from splitc.runtime.gpu.device import GpuDevice
from splitc.runtime.hardware.devices import Device
from splitc.runtime.package.steps import Reduce
from splitc.runtime.threads.failures import Failure
from tests.helpers.fake_gpus import FakeBackend


class NotedMail:
    """Records messages. The other rank can go on."""

    def __init__(self) -> None:
        self.told: deque[Any] = deque()

    def tell(self, target: int, label: Label, value: Any) -> None:
        self.told.append(value)

    def hear(self, source: int) -> tuple[Label, Any]:
        return LOADING, None


@pytest.mark.usefixtures("gpus")
def test_rank_without_memory_for_a_sum_says_so_before_nccl_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise EngineError("cuda0 has 0 bytes free")

    mail, part = NotedMail(), SimpleNamespace(shape=(4,), dtype="float32")
    collectives = Collectives(0, 2, mail, {}, FakeBackend(Device("cuda", 0)), by_nccl=True)  # type: ignore[arg-type]
    monkeypatch.setattr(GpuDevice, "empty", full)
    failed = collectives.all_reduce(Reduce("sum", ["x"], ["y"], [0, 1]), [part])
    (told,) = mail.told
    for each in (failed, told):
        assert isinstance(each, Failure) and "0 bytes free" in str(each.error)
