"""Which requests are worth recording as CUDA graphs."""

from __future__ import annotations

from splitc.runtime.gpu.array import Tape
from splitc.runtime.ranks.kept_recordings import FOR_PROMPTS, IDLE, MOST, NEW, Home, KeptRecordings, Kind
from splitc.runtime.ranks.recording import Recording

HOME = Home(0, ())


def of(size: int, states: int = 0) -> Kind:
    """Requests with a feed and states of these sizes."""
    return Kind(None, (("x", (size,)),), (states,), ())


def recorded(kept: KeptRecordings, kind: Kind, home: Home = HOME) -> None:
    kept.make_room(kind)
    kept.keep(home, kind, Recording(None, Tape(), {}, {}, None, None))


def test_further_kinds_come_ever_more_often_before_they_are_recorded() -> None:
    kept, counts = KeptRecordings(), []
    for kind in map(of, range(7)):
        count = 1
        while not kept.is_worth(kind):
            count += 1
        recorded(kept, kind)
        counts.append(count)
    assert counts == [NEW + 2] * 4 + [2 * NEW + 2, 4 * NEW + 2, 8 * NEW + 2]
    assert kept.is_worth(of(6)), "of another sequence, for which engines are prepared"


def test_oldest_recording_makes_room_only_when_it_is_idle() -> None:
    kept = KeptRecordings()
    for number in range(MOST):
        recorded(kept, of(1), Home(number, ()))
    assert not any(kept.is_worth(of(1)) for _ in range(NEW + 2))
    kept.requests += IDLE + 1
    assert kept.is_worth(of(1))
    recorded(kept, of(1), Home(MOST, ()))
    assert kept.pop(Home(0, ()), of(1)) is None
    assert kept.pop(Home(1, ()), of(1)) is not None


def test_convolutions_are_recorded_for_feeds_of_the_same_shapes() -> None:
    """The run before a capture unloads the kernels that earlier recordings launch."""
    kept = KeptRecordings(same_feeds=True)
    recorded(kept, of(1))
    recorded(kept, of(1, states=7), Home(1, ()))
    assert not any(kept.is_worth(of(2)) for _ in range(NEW + 2)), "the first is in use"
    kept.requests += IDLE + 1
    assert kept.is_worth(of(2))
    assert kept.pop(HOME, of(1)) is not None
    kept.make_room(of(2))
    assert kept.pop(Home(1, ()), of(1, states=7)) is None, "even if the other one can't be captured"


def test_prompts_are_recorded_later() -> None:
    """To record one takes as long as hundreds of replays gain."""
    kept, kind = KeptRecordings(), of(1)
    assert sum(not kept.is_worth(kind, begins=True) for _ in range(200)) == (NEW << FOR_PROMPTS) + 1
