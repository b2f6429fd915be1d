"""Work that says how far it is."""

from __future__ import annotations

from pathlib import Path

from splitc.compiler import plan_model
from splitc.runtime import Session
from splitc.runtime.counted import counted, listening
from splitc.runtime.tools.bench import bench
from tests.conftest import decoder_feeds

Heard = list[tuple[str, int, int]]


def test_listener_hears_of_each_item() -> None:
    heard: Heard = []
    with listening(lambda *each: heard.append(each)):
        assert list(counted("letters", "ab")) == ["a", "b"]
    assert heard == [("letters", 0, 2), ("letters", 1, 2), ("letters", 2, 2)]
    assert list(counted("letters", "ab")) == ["a", "b"], "nobody need listen"
    assert len(heard) == 3


def test_long_work_is_counted(decoder: Path, package: Path) -> None:
    heard: Heard = []
    with listening(lambda *each: heard.append(each)):
        plan = plan_model(decoder, ["cpu0", "cpu1"])
        with Session(package, threads=1) as session:
            bench(session, decoder_feeds(), runs=3, warmup=1)
    assert ("planning candidates", len(plan.alternatives), len(plan.alternatives)) in heard
    assert ("timing", 3, 3) in heard
