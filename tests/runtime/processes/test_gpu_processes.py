"""Ranks in processes, on fake GPUs (`fake_cupy`, `fake_nccl`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from splitc.runtime import Session
from splitc.runtime.errors import SplitcError
from splitc.runtime.ranks.kept_recordings import NEW
from splitc.runtime.ranks.loop import Replay
from tests.conftest import decoder_feeds, run_whole
from tests.helpers.fake_gpu_sessions import package


@pytest.fixture(autouse=True)
def fake_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitc.runtime.processes.device_processes.MAIN", "tests.helpers.fake_rank")


def test_known_shapes_are_replayed_by_each_rank(decoder: Path) -> None:
    with Session(package(decoder, "tensor", 2), devices=["2xcuda"]) as session:
        for number in range(2 * (NEW + 3)):
            feeds = decoder_feeds(new=1 + number % 2)
            outputs, served = session.run_timed(feeds)
            for name, whole in run_whole(decoder, feeds).items():
                np.testing.assert_allclose(outputs[name], whole, rtol=1e-4, atol=1e-5)
            replayed = [any(isinstance(span.step, Replay) for span in each.spans) for each in served.values()]
            assert replayed == [number // 2 > NEW] * 2
        assert session.notes == []
        metrics = session.metrics
        assert (metrics.done, metrics.captured, metrics.replayed) == (2 * (NEW + 3), 2, 4)
        assert all(seconds > 0 for seconds in metrics.busy)


def test_rank_that_can_not_replay_ends_the_session(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank would wait for its values forever, since replays send nothing step by step."""
    monkeypatch.setattr("splitc.runtime.processes.device_processes.MAIN", "tests.helpers.failing_replay_rank")
    with Session(package(decoder, "layer", 2), devices=["2xcuda"]) as session:
        with pytest.raises(SplitcError, match="a replay failed on purpose"):
            session.submit(decoder_feeds()).result(20)
        assert not session.usable
