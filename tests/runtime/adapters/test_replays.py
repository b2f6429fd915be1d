"""Requests with adapters are replayed as CUDA graphs, on fake GPUs."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splitc.runtime import Session
from splitc.runtime.ranks.kept_recordings import NEW
from splitc.runtime.ranks.loaded import EngineForms
from splitc.runtime.ranks.loop import Replay
from tests.conftest import assert_close, decoder_feeds
from tests.helpers.adapters import random_pairs, write_peft
from tests.helpers.fake_gpu_sessions import package
from tests.helpers.feeds import LAYERS
from tests.helpers.workers import workers_of

pytestmark = pytest.mark.usefixtures("gpus")
SIZES = {f"model.layers.{layer}.self_attn.q_proj": (64, 64) for layer in range(LAYERS)}
ASKED: list[Any] = ["style", {}, {"style": 0.5, "pose": 1.0}]


def load_both(session: Session, folder: Path) -> None:
    for number, name in enumerate(("style", "pose")):
        pairs = random_pairs(SIZES, 4 + number, seed=number, size=0.2)
        session.adapters.load(name, write_peft(folder / name, pairs))


@pytest.mark.parametrize(("mode", "ranks"), [("layer", 1), ("tensor", 2)])
def test_each_sum_has_recordings_of_its_own(decoder: Path, tmp_path: Path, mode: str, ranks: int) -> None:
    place = package(decoder, mode, ranks, lora_slots=4)
    feeds = decoder_feeds(2, 3, 5)
    with Session(place) as on_cpu, Session(place, devices=[f"{ranks}xcuda"]) as session:
        for each in (on_cpu, session):
            load_both(each, tmp_path)
        expected = [on_cpu.run(feeds, adapters=asked) for asked in ASKED]
        assert np.abs(expected[0]["logits"] - expected[1]["logits"]).max() > 1e-2
        for _ in range(NEW + 4):
            for asked, outputs in zip(ASKED, expected, strict=True):
                assert_close(session.run(feeds, adapters=asked), outputs)
        for asked, outputs in zip(ASKED, expected, strict=True):
            given, served = session.run_timed(feeds, adapters=asked)
            assert_close(given, outputs)
            assert all([type(span.step) for span in each.spans] == [Replay] for each in served.values())
        assert session.notes == []


def test_recordings_end_with_their_adapter(decoder: Path, tmp_path: Path) -> None:
    """An adapter loaded later under the same name gets new recordings."""
    place = package(decoder, "layer", 1, lora_slots=4)
    feeds = decoder_feeds(2, 3, 5)
    with Session(place) as on_cpu, Session(place, devices=["cuda0"]) as session:
        for each in (on_cpu, session):
            load_both(each, tmp_path)
        for _ in range(NEW + 4):
            session.run(feeds, adapters="style")
        (worker,) = workers_of(session)
        assert worker.replays is not None and len(worker.replays._kept._kept) == 1
        session.adapters.load("style", tmp_path / "pose")
        gc.collect()
        assert_close(session.run(feeds, adapters="style"), on_cpu.run(feeds, adapters="pose"))
        assert not worker.replays._kept._kept


def test_what_can_not_be_captured_runs_eagerly(decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    why = "adapted.onnx has nodes on the CPU"
    monkeypatch.setattr(EngineForms, "blocker", lambda self, values: why)
    place = package(decoder, "layer", 1, lora_slots=4)
    with Session(place, devices=["cuda0"]) as session:
        load_both(session, tmp_path)
        for _ in range(NEW + 4):
            session.run(decoder_feeds(), adapters="style")
        _, served = session.run_timed(decoder_feeds(), adapters="style")
        assert Replay not in {type(span.step) for each in served.values() for span in each.spans}
        assert session.notes == [f"requests are not replayed as CUDA graphs: {why}"]
