"""How packages of each split mode are spoken of. A mode that is not known here is spoken of in general."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModeWords:
    """What the ranks do together, who works on one request, and where weights are that are not split.

    `is_radial` says that values cross between the first rank and each other one, and not from stage to stage.
    """

    exchanges: str = "exchanges"
    at_work: str = "each rank works when its turn comes"
    whole: str = "each rank"
    is_radial: bool = False


WORDS = {
    "layer": ModeWords(at_work="one rank works while the others wait"),
    "row": ModeWords(
        exchanges="round trips",
        at_work="the main rank works, and the others multiply with it",
        whole="the main device",
        is_radial=True,
    ),
    "tensor": ModeWords(exchanges="collectives", at_work="all ranks work on it at once"),
}


def words_of(split_mode: str) -> ModeWords:
    """The words of a mode."""
    return WORDS.get(split_mode, ModeWords())
