"""The model as a strip of blocks, coloured by device, with the cuts and the bytes that cross them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitc.runtime.hardware.devices import device_named
from splitc.runtime.hardware.memory_use import RankMemory
from splitc.runtime.package.manifest import Cut
from splitc.runtime.reports.contents import Section, StripRank, StripStage, Table
from splitc.runtime.units import first_few, format_bytes

# The number of colours of devices.
COLOURS = 8


@dataclass(frozen=True)
class ShownRank:
    """A rank as pages show it: its device, blocks, predicted bytes, and its budget and measured bytes if known.

    `adapters` is the part of `total` that only requests with adapters need.
    """

    device: str
    blocks: Sequence[str]
    weights: int
    activations: int
    cache: int
    total: int
    budget: int | None = None
    measured: RankMemory | None = None
    adapters: int = 0


def strip_section(ranks: Sequence[ShownRank], cuts: Sequence[Cut], is_radial: bool, copies: int) -> Section:
    """The blocks of each rank. With `is_radial`, values cross between rank 0 and each other rank.

    Ranks of several `copies` of the model come one copy after the other. Each is shown below that of the first one.
    """
    size = len(ranks) // copies
    firsts = _share_stages(ranks[:size])
    groups = [[copy * size + number for copy in range(copies) for number in group] for group in firsts]
    stages = []
    for stage, group in enumerate(groups):
        blocks = max((ranks[number].blocks for number in group), key=len)
        shown = []
        for number in group:
            rank, own = ranks[number], set(ranks[number].blocks)
            exchanged = _bytes(cuts, number - 1) if is_radial and number else None
            shown.append(StripRank(number, rank.device, rank.weights, [block in own for block in blocks], exchanged))
        is_last = is_radial or stage == len(groups) - 1
        stages.append(StripStage(blocks, shown, None if is_last else _bytes(cuts, stage)))
    rows = []
    for number, cut in enumerate(cuts):
        place = (
            f"to {size - len(cuts) + number} and back" if cut.detour else f"{0 if is_radial else number}-{number + 1}"
        )
        rows.append((place, format_bytes(cut.bytes), first_few(cut.values) or "nothing"))
    tables = [Table("What crosses the cuts", ("cut", "a run", "values"), rows, right=("a run",))] if rows else []
    note = _say(is_radial, any(len(group) > 1 for group in firsts), len(groups) > 1)
    if copies > 1:
        note = f"{copies} groups of ranks have all blocks each: the second one's are below the first one's. {note}"
    return Section("Blocks", [note], strip=stages, tables=tables)


def _say(is_radial: bool, shares: bool, cuts: bool) -> str:
    weights = "The bytes below a rank are its weights"
    if is_radial:
        return f"Rank 0 runs the model, and the others have slices of it. {weights}, and ⇄ what it exchanges in a run."
    shards = "Ranks one below the other have shards or parts of the same blocks. " if shares else ""
    return f"{shards}{weights}{'; those on an arrow cross in a run' if cuts else ''}."


def colour_of(device: str) -> int:
    """The number of a device's colour, which is the same on all pages."""
    named = device_named(device)
    return (named.index + 5 * (named.host or 0) + (COLOURS // 2) * (named.kind == "cpu")) % COLOURS


def _share_stages(ranks: Sequence[ShownRank]) -> list[list[int]]:
    """The numbers of the ranks of each stage: consecutive ones that have blocks in common."""
    stages: list[list[int]] = []
    for number, rank in enumerate(ranks):
        if stages and set(rank.blocks) & set(ranks[stages[-1][0]].blocks):
            stages[-1].append(number)
        else:
            stages.append([number])
    return stages


def _bytes(cuts: Sequence[Cut], number: int) -> int:
    return cuts[number].bytes if number < len(cuts) else 0
