"""Words for messages about packages of each split mode, with defaults for other modes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModeWords:
    """Words for collectives, for which ranks work on one request, and for where unsplit weights are held.

    `is_radial` says that values cross between rank 0 and each other rank, rather than from stage to stage.
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
    "batch": ModeWords(at_work="all ranks work at once, each on its rows"),
    "tensor": ModeWords(exchanges="collectives", at_work="all ranks work on it at once"),
}


def words_of(split_mode: str) -> ModeWords:
    """The words for a mode."""
    return WORDS.get(split_mode, ModeWords())


def mode_in_words(mode: str, ranks: int, groups: int) -> str:
    """How a model is split; on a single device it is not. Each of several `groups` has the whole model."""
    inside = f", in {groups} groups" if 1 < groups < ranks else ""
    return f"{mode}{inside}" if ranks > 1 else "none, on one device"
