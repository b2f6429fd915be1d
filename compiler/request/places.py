"""Where to place weights: a regular expression for their names and a device, as in `experts=cpu0`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from splitc.runtime.errors import MisuseError


@dataclass(frozen=True)
class Place:
    """Places the weights whose names match `pattern` on `device`."""

    pattern: str
    device: str

    def __str__(self) -> str:
        return f"{self.pattern}={self.device}"


@dataclass(frozen=True)
class ExpertsPlace:
    """Places the experts of the first `layers` layers that have some (None: of all) on `device`."""

    device: str
    layers: int | None = None

    def __str__(self) -> str:
        return self.device if self.layers is None else f"{self.device}:{self.layers}"


def parse_places(texts: Iterable[str]) -> tuple[Place, ...]:
    """Parse `REGEX=DEVICE` entries. Raises MisuseError for an invalid one."""
    return tuple(map(_parse_place, texts))


def _parse_place(text: str) -> Place:
    pattern, _, device = text.rpartition("=")
    if not pattern or not device:
        raise MisuseError(f"can't read --place {text}: write a regular expression and a device, as in 'experts=cpu0'")
    try:
        re.compile(pattern)
    except re.error as error:
        raise MisuseError(f"--place {text}: '{pattern}' is no regular expression: {error}") from None
    return Place(pattern, device)


def parse_experts(text: str | None) -> ExpertsPlace | None:
    """Parse `DEVICE` or `DEVICE:LAYERS`. Raises MisuseError if it is invalid."""
    if text is None:
        return None
    device, colon, layers = text.partition(":")
    if not device or (colon and not (layers.isdecimal() and int(layers))):
        raise MisuseError(f"can't read --experts {text}: write a device, or one and a number of layers, as in cpu0:4")
    return ExpertsPlace(device, int(layers) if colon else None)
