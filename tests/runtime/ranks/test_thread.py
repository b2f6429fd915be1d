"""The thread of a rank."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from splitc.runtime import Session
from splitc.runtime.errors import EngineError
from tests.helpers.fake_gpus import FakeBackend, HostEngine, package


@pytest.mark.usefixtures("gpus")
def test_a_rank_that_fails_to_load_leaves_its_gpu(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has begun there ends before its engines are freed, which nobody waits for who has the error."""
    engines: list[weakref.ref[HostEngine]] = []
    left: list[tuple[str, bool]] = []
    load, detach = FakeBackend.load, FakeBackend.detach

    def seen_load(self: FakeBackend, *args: Any) -> HostEngine:
        engine = load(self, *args)
        engines.append(weakref.ref(engine))
        return engine

    def fail(self: FakeBackend, size: int) -> None:
        raise EngineError("the GPU has no room")

    def seen_detach(self: FakeBackend) -> None:
        left.append((threading.current_thread().name, engines[0]() is not None))
        detach(self)

    monkeypatch.setattr(FakeBackend, "load", seen_load)
    monkeypatch.setattr(FakeBackend, "reserve", fail)
    monkeypatch.setattr(FakeBackend, "detach", seen_detach)
    with pytest.raises(EngineError, match="the GPU has no room"):
        Session(package(decoder, "layer", 1), devices=["cuda0"])
    assert left == [("splitc rank 0 (cpu0)", True)]  # named after the device that was planned for
    assert [engine() for engine in engines] == [None]
