"""Which requests are worth recording."""

from __future__ import annotations

from splitc.runtime.gpu.array import Tape
from splitc.runtime.ranks.kept_recordings import NEW, Home, KeptRecordings
from splitc.runtime.ranks.recording import Recording


def test_further_kinds_come_ever_more_often_before_they_are_recorded() -> None:
    kept, home, counts = KeptRecordings(), Home(0, ()), []
    for kind in map(str, range(7)):
        count = 1
        while not kept.is_worth((kind,)):
            count += 1
        kept.keep(home, (kind,), Recording(None, Tape(), {}, {}, None, None))
        counts.append(count)
    assert counts == [NEW + 2] * 4 + [2 * NEW + 2, 4 * NEW + 2, 8 * NEW + 2]
    assert kept.is_worth(("6",)), "of another sequence, for which engines are prepared"
