"""Ranks hold sums of adapters: each is sent once, again after a failure, and is freed."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import EngineError, Session
from splitc.runtime.adapters.held import HeldSum
from splitc.runtime.gpu.array import Tape
from splitc.runtime.ranks.kept_recordings import Home, KeptRecordings, kind_of
from splitc.runtime.ranks.recording import Recording
from splitc.runtime.ranks.request import InFlightRequest
from tests.conftest import assert_close, decoder_feeds
from tests.helpers.adapters import random_pairs, write_peft
from tests.helpers.feeds import LAYERS
from tests.helpers.workers import workers_of

SIZES = {f"model.layers.{layer}.self_attn.q_proj": (64, 64) for layer in range(LAYERS)}

# A and B of seven products in each layer, and of the head.
SLOTS = 2 * (7 * LAYERS + 1)


@pytest.fixture(scope="module")
def style(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_peft(tmp_path_factory.mktemp("adapter") / "style", random_pairs(SIZES, 4, size=0.2))


@cache
def slotted(decoder: Path, mode: str) -> Path:
    package = decoder.with_name(f"held-{mode}")
    compile_model(plan_model(decoder, "2xcpu", Request(split_mode=mode, lora_slots=4)), package, verify=False)
    return package


def spy_orders(session: Session, monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The names of the slot arrays that go to the ranks' processes with each request."""
    wire: Any = session._workers._wire  # type: ignore[union-attr]
    order, sent = wire.order, list[set[str]]()

    def spied(message: Any, feeds: Any, initial: Any) -> None:
        sent.append({name for name, _ in initial} & session.manifest.slot_inputs)
        order(message, feeds, initial)

    monkeypatch.setattr(wire, "order", spied)
    return sent


def test_processes_are_sent_a_sum_once(decoder: Path, style: Path, monkeypatch: Any) -> None:
    feeds = decoder_feeds(2, 5, 3)
    with Session(slotted(decoder, "tensor"), ranks="processes") as session:
        session.adapters.load("style", style)
        sent = spy_orders(session, monkeypatch)
        first = session.run(feeds, adapters="style")
        again = session.run(feeds, adapters="style")
        with session.start(adapters="style") as sequence:
            sequence.run({name: feed for name, feed in decoder_feeds(2, 5, 0).items() if "past" not in name})
        half = session.run(feeds, adapters={"style": 0.5})
        assert [len(names) for names in sent] == [SLOTS, 0, 0, SLOTS]
        np.testing.assert_array_equal(first["logits"], again["logits"])
        assert np.abs(first["logits"] - half["logits"]).max() > 1e-2
        assert len(session._workers._held) == 2  # type: ignore[union-attr]
        session.adapters.unload("style")
        del sequence
        gc.collect()
        session.run(feeds)
        assert not session._workers._held  # type: ignore[union-attr]


def test_it_comes_again_after_a_failure(decoder: Path, style: Path, monkeypatch: Any) -> None:
    good = decoder_feeds(2, 5, 3)
    bad: Mapping[str, Any] = {**good, "input_ids": np.full_like(good["input_ids"], 10**6)}
    with Session(slotted(decoder, "tensor"), ranks="processes") as session:
        session.adapters.load("style", style)
        sent = spy_orders(session, monkeypatch)
        with pytest.raises(EngineError):
            session.run(bad, adapters="style")
        given = session.run(good, adapters="style")
        assert [len(names) for names in sent] == [SLOTS, SLOTS]
    with Session(slotted(decoder, "tensor"), ranks="threads") as session:
        session.adapters.load("style", style)
        assert_close(given, session.run(good, adapters="style"))


def test_rank_that_has_not_got_a_sum_gets_it_with_the_next_request(
    decoder: Path, style: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it could not put the arrays on its device, or the request that carried them failed before."""
    feeds = decoder_feeds(2, 5, 3)
    with Session(slotted(decoder, "tensor"), ranks="threads") as session:
        session.adapters.load("style", style)
        expected = session.run(feeds, adapters={"style": 0.5})
        with monkeypatch.context() as patch:
            patch.setattr(workers_of(session)[1].backend, "upload", fail)
            with pytest.raises(EngineError, match="no memory"):
                session.run(feeds, adapters="style")
        assert [len(rank.computation.adapters) for rank in workers_of(session)] == [2, 1]
        whole = session.run(feeds, adapters="style")
    with Session(slotted(decoder, "tensor"), ranks="processes") as session:
        session.adapters.load("style", style)
        assert_close(session.run(feeds, adapters={"style": 0.5}), expected)
        held = session.adapters.sum("style")
        assert held is not None
        session._workers._held.add(held.number)  # type: ignore[union-attr]  # as if a rank had failed to take it
        with pytest.raises(EngineError, match="did not reach this rank"):
            session.run(feeds, adapters="style")
        assert_close(session.run(feeds, adapters="style"), whole)
        assert_close(session.run(feeds, adapters={"style": 0.5}), expected)


def fail(*_: Any) -> Any:
    raise EngineError("no memory")


def test_threads_free_what_nobody_has(decoder: Path, style: Path) -> None:
    with Session(slotted(decoder, "batch"), ranks="threads") as session:
        session.adapters.load("style", style)
        session.run(decoder_feeds(4, 5, 3), adapters="style")
        ranks = workers_of(session)
        assert [len(rank.computation.adapters) for rank in ranks] == [1, 1]
        session.adapters.unload("style")
        gc.collect()
        session.run(decoder_feeds(4, 5, 3))
        assert [len(rank.computation.adapters) for rank in ranks] == [0, 0]


def test_recordings_are_of_one_sum_and_go_with_it() -> None:
    """A recorded graph contains the addresses of the sum's arrays."""
    kept, home = KeptRecordings(), Home(-1, ())
    kinds = [kind_of(InFlightRequest({}, adapters=held), home) for held in (None, HeldSum(3, {}), HeldSum(4, {}))]
    assert len(set(kinds)) == 3
    for kind in kinds:
        kept.keep(home, kind, Recording(None, Tape(), {}, {}, None, None))
    kept.drop_adapters(3)
    assert [kept.pop(home, kind) is not None for kind in kinds] == [True, False, True]
