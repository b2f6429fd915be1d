"""A sum of adapters that ranks hold: it goes to them once, with the first request that has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from splitc.runtime.arrays.array import Array


@dataclass(frozen=True, eq=False)
class HeldSum:
    """The inputs of slots, by name, for a sum of adapters. Ranks hold them under its number until it is forgotten.

    Numbers are those of sequences too: one is never given to both. On a rank in a process of its own there are no
    `arrays` from the second request on.
    """

    number: int
    arrays: Mapping[str, Array]
