"""Stop texts: which text is passed on, and when it ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from splitc.runtime.generate.text import StopTexts

SHORT = st.text("ab.", max_size=4)


@given(st.lists(SHORT, max_size=12), st.lists(SHORT, max_size=3))
def test_text_ends_before_the_first_stop_text_whatever_the_pieces(pieces: list[str], stops: list[str]) -> None:
    taken, given_on = StopTexts(stops), ""
    for piece in pieces:
        given_on += taken.take(piece)
        if taken.ended:
            break
    else:
        given_on += taken.rest()
    text = "".join(pieces)
    places = [text.find(stop) for stop in stops if stop and stop in text]
    # One that ends earlier ends the text, though another one may have begun before it.
    ends = [text.find(stop) + len(stop) for stop in stops if stop and stop in text]
    assert taken.ended == bool(places)
    if not places:
        assert given_on == text
    else:
        assert text.startswith(given_on) and min(places) <= len(given_on) <= max(0, min(ends))


def test_only_what_may_become_a_stop_text_is_held_back() -> None:
    stops = StopTexts(["\nUser:", "###"])
    assert [stops.take(piece) for piece in ("Hello", "\nUs", "eful #", "#", "1")] == [
        "Hello",
        "",
        "\nUseful ",
        "",
        "##1",
    ]
    assert not stops.ended and stops.rest() == ""
    assert stops.take("a\nUser: b") == "a" and stops.ended
