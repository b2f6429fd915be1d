"""Which requests are worth recording."""

from __future__ import annotations

from splitc.runtime.gpu.array import Tape
from splitc.runtime.ranks.kept_recordings import IDLE, MOST, NEW, Home, KeptRecordings
from splitc.runtime.ranks.recording import Recording

HOME = Home(0, ())


def recorded(kept: KeptRecordings, kind: str, home: Home = HOME) -> None:
    kept.make_room((kind,))
    kept.keep(home, (kind,), Recording(None, Tape(), {}, {}, None, None))


def test_further_kinds_come_ever_more_often_before_they_are_recorded() -> None:
    kept, counts = KeptRecordings(), []
    for kind in map(str, range(7)):
        count = 1
        while not kept.is_worth((kind,)):
            count += 1
        recorded(kept, kind)
        counts.append(count)
    assert counts == [NEW + 2] * 4 + [2 * NEW + 2, 4 * NEW + 2, 8 * NEW + 2]
    assert kept.is_worth(("6",)), "of another sequence, for which engines are prepared"


def test_oldest_recording_makes_room_only_when_it_is_idle() -> None:
    kept = KeptRecordings()
    for number in range(MOST):
        recorded(kept, "kind", Home(number, ()))
    assert not any(kept.is_worth(("kind",)) for _ in range(NEW + 2))
    kept.requests += IDLE + 1
    assert kept.is_worth(("kind",))
    recorded(kept, "kind", Home(MOST, ()))
    assert kept.pop(Home(0, ()), ("kind",)) is None
    assert kept.pop(Home(1, ()), ("kind",)) is not None


def test_convolutions_are_recorded_for_one_kind_at_a_time() -> None:
    """Before a capture they run on its shapes, which unloads what earlier recordings launch."""
    kept = KeptRecordings(one_kind=True)
    recorded(kept, "one")
    recorded(kept, "one", Home(1, ()))
    assert not any(kept.is_worth(("other",)) for _ in range(NEW + 2)), "the first is in use"
    kept.requests += IDLE + 1
    assert kept.is_worth(("other",))
    kept.make_room(("other",))
    assert kept.pop(HOME, ("one",)) is None, "even if the other one can't be captured"
    assert kept.pop(Home(1, ()), ("one",)) is None
