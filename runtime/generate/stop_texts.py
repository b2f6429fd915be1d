"""Texts that end generation. Generated text is passed on, except what may still become one of them."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Takes pieces of text, and passes it on up to the first stop text. `ended`: a stop text came."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.ended = False

    def take(self, piece: str) -> str:
        """The text that can be passed on after this piece."""
        text = self._held + piece
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.ended, self._held = True, ""
            return text[: min(places)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """The text that was held back, at the end."""
        return self._held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of the text that is a prefix of the stop text."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
