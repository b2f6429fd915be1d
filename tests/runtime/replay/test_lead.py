"""What a rank that is fed nothing records and replays: what the first rank of its group tells it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from splitc.runtime.collectives.engine_meeting import EngineMeeting, MeetingEnd
from splitc.runtime.engines import NEW
from splitc.runtime.engines.gpu_device import GpuDevice
from splitc.runtime.engines.operator_library import is_built
from splitc.runtime.replay.kept import MOST
from splitc.runtime.replay.lead import Lead, find_lead
from splitc.runtime.replay.led_replays import LedReplays, make_replays
from splitc.runtime.replay.rank_replays import RankReplays
from splitc.runtime.steps import Run

pytestmark = pytest.mark.skipif(not is_built(), reason="splitc was installed without a C compiler")

LEAD = Lead((0, 1), (1,))


@dataclass
class FakeWorker:
    """A rank that only says what it does."""

    end: MeetingEnd
    states: dict[int | None, dict[str, Any]] = field(default_factory=dict)
    capture_blocker: str | None = None
    resident: dict[str, str] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.backend = object.__new__(GpuDevice)

    @property
    def sequences(self) -> dict[int | None, dict[str, Any]]:
        return self.states

    def communicator(self, group: tuple[int, ...]) -> MeetingEnd:
        assert group == LEAD.group
        return self.end

    def drain(self) -> None:
        pass


class Recording:
    last = 0

    def __init__(self, number: int, worker: FakeWorker) -> None:
        self.number = number
        worker.done.append(f"record {number}")

    def launch(self, worker: FakeWorker, gpu: object, request: object) -> tuple[dict[str, Any], Any]:
        worker.done.append(f"replay {self.number}")
        return {}, None


def record(self: Any, worker: Any, gpu: Any, request: Any, kind: Any, states: Any, number: int) -> Any:
    made = Recording(number, worker)
    return made, made.launch(worker, gpu, request)


def request(length: int, sequence: int | None = None) -> Any:
    feeds = {"ids": SimpleNamespace(shape=(1, length))}
    return SimpleNamespace(feeds=feeds, sequence=sequence, initial={}, room=False, on_device=False)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[FakeWorker, RankReplays]]:
    monkeypatch.setattr(RankReplays, "_record", record)
    meeting = EngineMeeting(2)
    workers = [FakeWorker(meeting.join(place)) for place in range(2)]
    return list(zip(workers, (RankReplays((), (0, 1), LEAD), LedReplays((0, 1), LEAD)), strict=True))


def play(ranks: list[tuple[FakeWorker, RankReplays]], each: Any) -> list[list[str]]:
    """What the ranks do with a request."""

    def run(rank: tuple[FakeWorker, RankReplays]) -> list[str]:
        worker, replays = rank
        worker.end.begin()
        worker.done.clear()
        played = replays.play(worker, each)  # type: ignore[arg-type]
        return [*worker.done, *([] if played else ["eager"])]

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, ranks))


def test_led_rank_does_what_the_first_one_does(ranks: Any) -> None:
    """Also for sequences whose states only the first rank has, with shapes that the other one can't see."""
    found = []
    states = ranks[0][0].states
    for past in range(4):  # the state grows with each request, so no two are alike
        states[1] = {"past": SimpleNamespace(shape=(1, past))}
        found.append(play(ranks, request(1, 1)))
    states[1] = {"past": SimpleNamespace(shape=(1, 9))}
    found += [play(ranks, request(1, 1)) for _ in range(NEW + 3)]
    states[2] = {"past": SimpleNamespace(shape=(1, 9))}  # another sequence, with its own memory
    found += [play(ranks, request(1, 2)) for _ in range(2)]
    for first, second in found:
        assert first == second
    assert [first for first, _ in found[-5:]] == [
        ["eager"],
        ["record 1", "replay 1"],
        ["replay 1"],
        ["record 2", "replay 2"],
        ["replay 2"],
    ]


def test_led_rank_keeps_no_more_than_the_first_one(ranks: Any) -> None:
    for length in range(1, MOST + 3):
        for _ in range(NEW + 2):
            first, second = play(ranks, request(length))
            assert first == second
    for length in (*[1] * 70, *[20] * (NEW + 2), 21):  # those that are idle make room for others
        first, second = play(ranks, request(length))
        assert first == second
    kept = {each.number for each in ranks[0][1]._kept.all()}
    assert len(kept) == MOST
    assert set(ranks[1][1]._numbered) == kept


def test_nobody_is_told_where_nothing_is_recorded(ranks: Any) -> None:
    for worker, _ in ranks:
        worker.capture_blocker = "it waits"
    assert play(ranks, request(1)) == [["eager"], ["eager"]]


def test_ranks_without_inputs_are_led() -> None:
    def rank(inputs: list[str], group: list[int]) -> Any:
        return SimpleNamespace(inputs=inputs, engines=[SimpleNamespace(group=group)], program=[Run(0)])

    def leads(*inputs: list[str], group: list[int]) -> list[Lead | None]:
        manifest: Any = SimpleNamespace(ranks=[rank(each, group) for each in inputs])
        return [find_lead(manifest, number) for number in range(len(inputs))]

    assert leads(["x"], [], [], group=[0, 1, 2]) == [Lead((0, 1, 2), (1, 2))] * 3
    assert leads(["x"], ["x"], group=[0, 1]) == leads(["x"], [], group=[]) == [None, None]


@pytest.mark.parametrize(("second", "alike"), [(["past"], True), ([], False)])
def test_sequences_are_not_replayed_if_only_some_ranks_have_their_states(second: list[str], alike: bool) -> None:
    ranks = [SimpleNamespace(inputs=inputs, engines=[]) for inputs in (["x", "past"], second)]
    manifest: Any = SimpleNamespace(states=[SimpleNamespace(input="past")], ranks=ranks, optional=[])
    worker: Any = FakeWorker(EngineMeeting(1).join(0), capture_blocker="none is")
    request: Any = SimpleNamespace(sequence=1, initial={}, feeds={}, on_device=False)
    for everyone in (range(2), range(0)):  # where ranks wait for each other, and where they do not
        replays = make_replays(manifest, 0, everyone)
        assert replays.play(worker, request) is None
        assert any("others have none" in note for note in replays.notes) == (bool(everyone) and not alike)
