"""`plan.json`: the plan as a file that a person may edit. To move a block, change its number under `blocks`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from splitc.compiler.frontend.asked_shapes import Shape
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.rank_plan import Rematerialized
from splitc.runtime.errors import MisuseError
from splitc.runtime.files import written_whole
from splitc.runtime.manifest import Source, State

SCHEMA = 2
# Weights below this many bytes are not listed.
LISTED = 64 << 10


class RankEntry(Struct, frozen=True):
    """A rank: its device, budget and share, which an editor may change; the rest is for reading only.

    In tensor mode ranks that follow each other share a `stage`, by their shares; in layer mode each has its own. In row
    mode there is but one, and the first rank is the main one.
    """

    device: str
    budget_bytes: int | None
    stage: int = 0
    share: float = 1.0
    weights_bytes: int = 0
    activation_bytes: int = 0
    cache_bytes: int = 0
    total_bytes: int = 0
    seconds: float = 0.0
    repeated: Rematerialized | None = None


class CutEntry(Struct, frozen=True):
    """What crosses a cut, for reading only."""

    bytes: int
    values: list[str]


class WeightEntry(Struct, frozen=True):
    """Where a weight ends up, for reading only: on more than one rank when several read it.

    `split` is "whole", with the reason in row and tensor mode, or how many units of its axis each rank of a stage has.
    """

    bytes: int
    ranks: list[int]
    split: str


class CandidateEntry(Struct, frozen=True):
    """What auto mode compared, for reading only: seconds, bytes at the devices' peaks, or why it can't be."""

    name: str
    latency: float = 0.0
    interval: float = 0.0
    peaks: list[int] = []
    refused: str | None = None


class PlanFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of plan.json. `blocks` maps every block, in the model's order, to the number of its stage.

    In layer mode stages are ranks. `states` are the inputs that take an output of the run before.

    `shapes` are the largest of the inputs; the others are there where engines are to take a range of them.
    `finest` says that the model is cut wherever it can be, instead of into the blocks that repeat. `row_min` is the
    shortest side of a matrix that row mode slices. `settings` are inputs that are bound to constants.
    """

    schema: int
    source: Source
    split_mode: str
    engine: str
    objective: str
    shapes: dict[str, list[int]]
    ranks: list[RankEntry]
    finest: bool
    blocks: dict[str, int]
    settings: dict[str, Any] = {}
    min_shapes: dict[str, list[int]] = {}
    opt_shapes: dict[str, list[int]] = {}
    states: list[State] | None = None
    row_min: int | None = None
    cuts: list[CutEntry] = []
    warnings: list[str] = []
    weights: dict[str, WeightEntry] = {}
    candidates: list[CandidateEntry] = []
    choice: str | None = None


def to_file(plan: Plan) -> PlanFile:
    """The plan as it is written."""
    analysis = plan.analysis
    graph = analysis.graph
    weights: dict[str, WeightEntry] = {}
    fates = {each.name: f"whole: {each.reason}" if each.reason else each.units for each in plan.weights}
    for number, rank in enumerate(plan.ranks):
        for weight in analysis.costs.weights(rank.stage.nodes):
            size = analysis.costs.value_bytes(weight)
            if size >= LISTED:
                name = weight.name or ""
                entry = weights.setdefault(name, WeightEntry(size, [], fates.get(name, "whole")))
                entry.ranks.append(number)
    stages = plan.stages
    return PlanFile(
        schema=SCHEMA,
        source=graph.source,
        split_mode=plan.split_mode,
        engine=plan.engine,
        objective=plan.objective,
        shapes=_lists(analysis.shapes),
        settings={each.input.name or "": each.value.tolist() for each in graph.fixed if each.value is not None},
        min_shapes={} if analysis.smallest == analysis.shapes else _lists(analysis.smallest),
        opt_shapes={} if analysis.typical == analysis.shapes else _lists(analysis.typical),
        ranks=[
            RankEntry(
                str(rank.device),
                rank.budget,
                rank.group,
                rank.share,
                rank.memory.weights,
                rank.memory.activations,
                rank.memory.cache,
                rank.memory.total,
                round(rank.seconds, 9),
                rank.rematerialized,
            )
            for rank in plan.ranks
        ],
        finest=analysis.partition.finest,
        blocks={block.name: number for number, stage in enumerate(stages) for block in stage.blocks},
        states=list(analysis.states),
        cuts=[CutEntry(cut.bytes, [value.name or "" for value in cut.values]) for cut in plan.cuts],
        warnings=list(plan.warnings),
        weights=weights,
        candidates=[
            CandidateEntry(each.name, round(each.latency, 9), round(each.interval, 9), list(each.peaks), each.refused)
            for each in plan.alternatives
        ],
        choice=plan.choice,
        **plan.split.file_fields(),
    )


def _lists(shapes: Mapping[str, Shape]) -> dict[str, list[int]]:
    return {name: list(shape) for name, shape in shapes.items()}


def write_plan(plan: Plan, path: Path) -> None:
    """Write plan.json, all of it or nothing. Raises MisuseError when it can't be written."""
    with written_whole(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(to_file(plan)), indent=2) + b"\n")


def read_plan(path: Path) -> PlanFile:
    """Read plan.json. Raises MisuseError when it is no plan, of another schema, or names a block twice."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
        return msgspec.convert(content, PlanFile)
    except FileNotFoundError:
        raise MisuseError(f"no such plan: {path}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, msgspec.ValidationError) as error:
        raise MisuseError(f"{path} is no plan: {error}") from error
    except _Duplicate as error:
        raise MisuseError(f'{path} has the line "{error.args[0]}" twice') from None


class _Duplicate(Exception):
    """A key that stands twice in one object; json would keep the last without a word."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _Duplicate(f"{key}: {value}")
        result[key] = value
    return result


def check_file_shares(ranks: Sequence[RankEntry], may_be_empty: int = 0) -> None:
    """Raise MisuseError for a share of nothing or less; so many first ranks may have none."""
    if any(rank.share <= 0 for rank in ranks[may_be_empty:]) or any(rank.share < 0 for rank in ranks):
        raise MisuseError("the plan has a rank with a share of 0 or less: take it out instead")
