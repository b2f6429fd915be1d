"""States as users give them. This module imports none of the compiler's libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from splitc.runtime.errors import MisuseError


@dataclass(frozen=True)
class AskedStates:
    """Outputs by the inputs that they replace in the next run. With `alone` there are no other states.

    `where` names the place where they are given, for messages.
    """

    outputs: Mapping[str, str] = field(default_factory=dict)
    alone: bool = False
    where: str = "--state"


def parse_states(texts: Sequence[str]) -> dict[str, str]:
    """Parse pairs of names from `past=present`. Raises MisuseError for other text, and for a name that occurs twice."""
    states: dict[str, str] = {}
    for text in texts:
        name, _, output = text.rpartition("=")
        if not name or not output:
            raise MisuseError(f"can't read --state {text}: write INPUT=OUTPUT")
        if name in states:
            raise MisuseError(f"--state gives '{name}' twice, the second time by {text}: leave out one of them")
        states[name] = output
    return states
