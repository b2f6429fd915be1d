"""Texts that end a text: what was generated is given on, but for what may still become one of them."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Takes pieces of a text, and gives it on up to the first of some texts. `ended` says that one of them came."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.ended = False

    def take(self, piece: str) -> str:
        """The text that one more piece makes certain."""
        text = self._held + piece
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.ended, self._held = True, ""
            return text[: min(places)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """What was held back, when no more comes."""
        return self._held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text that begins the stop text."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
