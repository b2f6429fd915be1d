"""A sum of adapters that ranks hold: it goes to them once, with the first request that has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from splitc.runtime.arrays.array import Array
from splitc.runtime.package.manifest import Rank
from splitc.runtime.package.parts import cut_places


@dataclass(frozen=True, eq=False)
class HeldSum:
    """The inputs of slots, by name, for a sum of adapters. Ranks hold them under its number until it is forgotten.

    Numbers are those of sequences too: one is never given to both. On a rank in a process of its own there are no
    `arrays` from the second request on.
    """

    number: int
    arrays: Mapping[str, Array]


def shards_of(arrays: Mapping[str, Array], rank: Rank) -> dict[str, Array]:
    """A rank's shards of a sum's arrays, by its engines' names for them."""
    return {
        override.value: cut_places(arrays[override.input], override.places)
        for override in rank.overrides
        if override.input in arrays
    }
