"""Steps of ranks' programs."""

from __future__ import annotations

from splitc.runtime.steps import Receive, Reduce, Send, overlap


def test_requests_overlap_where_a_rank_needs_nothing_of_another() -> None:
    together = Reduce("sum", ["a"], ["b"], [0, 1])
    assert overlap([[Send("a", 1)], [Receive("a", 0)]])
    assert not overlap([[Send("a", 1), Receive("b", 1)], [Receive("a", 0), Send("b", 0)]])
    assert not overlap([[together], [together]])
    assert overlap([[together, Send("b", 2)], [together], [Receive("b", 0)]])
    assert not overlap([[]])
