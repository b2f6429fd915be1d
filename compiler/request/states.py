"""States as users give them. This module imports none of the compiler's libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from splitc.runtime.units import named_values


@dataclass(frozen=True)
class AskedStates:
    """Outputs by the inputs that they replace in the next run. With `alone` there are no other states.

    `where` names the place where they are given, for messages.
    """

    outputs: Mapping[str, str] = field(default_factory=dict)
    alone: bool = False
    where: str = "--state"


def parse_states(texts: Sequence[str]) -> dict[str, str]:
    """Pairs of names from `past=present`. Raises MisuseError for any other text, and for a name that comes twice."""
    return named_values("--state", texts, "INPUT=OUTPUT")
