"""`plan.json`: the plan as a file that people may edit. To move a block, change its number under `blocks`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from splitc.compiler.adapters.slots import is_slot_input
from splitc.compiler.analysis.blocks import PLACED
from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.rank_plan import RankPlan, Rematerialized
from splitc.compiler.request.request import DISK, HOST, OBJECTIVES
from splitc.compiler.request.shapes import LARGEST, Shape, check_size
from splitc.runtime.errors import MisuseError
from splitc.runtime.files.written import indented, parse_json, written_whole
from splitc.runtime.hardware.devices import Device, host_numbers
from splitc.runtime.package.manifest import LISTED, Cut, Source
from splitc.runtime.package.states import State

SCHEMA = 2


class RankEntry(Struct, frozen=True):
    """A rank. Its device, budget and share may be edited, in tensor mode also its stage; the rest is informative.

    - `limited`: engines are held to the budget while they run.
    - `stage`: in tensor mode, consecutive ranks share a stage, in proportion to `share`. In layer mode each rank has
      its own. In row mode there is one stage, and rank 0 is the main one.

    Ranks of several groups, each with the whole model, are listed one group after the other. A group's share of the
    rows is the sum of its ranks' shares.
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
    limited: bool = False


class WeightEntry(Struct, frozen=True):
    """The ranks that hold a weight, or shards of it. Informative.

    `split` is "whole", in row and tensor mode with the reason; or the units of its axis on each rank of a stage; or
    "placed" if it lies on another device than its block.
    """

    bytes: int
    ranks: list[int]
    split: str


class CandidateEntry(Struct, frozen=True):
    """An alternative that auto mode compared: seconds, and the devices' peaks in bytes; or why it is impossible.

    Informative.
    """

    name: str
    latency: float = 0.0
    interval: float = 0.0
    peaks: list[int] = []
    placement: str = ""
    refused: str | None = None


class MergedEntry(Struct, frozen=True):
    """An adapter that is merged into the weights: its file or folder, and its scale."""

    file: str
    scale: float


class PlanFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of plan.json.

    - `blocks`: the number of each block's stage, in the model's order. In layer mode stages are ranks.
    - `states`: the inputs that take an output of the previous run.
    - `shapes`: the largest input shapes. `min_shapes`, `opt_shapes`: given if engines take a range.
    - `finest`: the model is cut wherever possible, instead of into the repeated blocks.
    - `row_min`: the minimum side of a matrix that row mode slices.
    - `fused`: attention and the like were fused where possible.
    - `settings`: inputs that are bound to constants.
    - `lora`: adapters that are merged into weights. `lora_slots`: the rank of adapters that requests may bring.
    - `hosts`: the number of hosts that the ranks' devices name (`host0/cuda0` and so on), or 1 if they name none.
    - `islands`: in tensor mode, the outputs of nodes whose shards are joined there. Remove one, and its weights are
      whole.
    - `placed`: weights that lie on other devices than the blocks, with their devices.
    - `weights_at`: where the weights of CPU devices are.
    - `batch_groups`: the number of groups of ranks that each have the whole model, and divide the rows of a batch.
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
    hosts: int | None = None
    settings: dict[str, Any] = {}
    lora: list[MergedEntry] = []
    lora_slots: int | None = None
    min_shapes: dict[str, list[int]] = {}
    opt_shapes: dict[str, list[int]] = {}
    states: list[State] | None = None
    row_min: int | None = None
    fused: bool = False
    islands: list[str] = []
    placed: dict[str, str] = {}
    weights_at: str = HOST
    batch_groups: int = 1
    cuts: list[Cut] = []
    warnings: list[str] = []
    weights: dict[str, WeightEntry] = {}
    candidates: list[CandidateEntry] = []
    choice: str | None = None


def to_file(plan: Plan) -> PlanFile:
    """The content of plan.json for a plan."""
    analysis = plan.analysis
    graph = analysis.graph
    return PlanFile(
        schema=SCHEMA,
        source=graph.source,
        split_mode=plan.split_mode,
        engine=plan.engine,
        objective=plan.objective,
        shapes=_lists(analysis, analysis.shapes),
        lora_slots=analysis.slot_rank,
        lora=[MergedEntry(merged.adapter.name, merged.strength) for merged in analysis.merged],
        settings={fixed.input.name or "": fixed.value.tolist() for fixed in graph.fixed if fixed.value is not None},
        min_shapes={} if analysis.smallest == analysis.shapes else _lists(analysis, analysis.smallest),
        opt_shapes={} if analysis.typical == analysis.shapes else _lists(analysis, analysis.typical),
        ranks=list(map(_rank_entry, plan.ranks)),
        finest=analysis.partition.finest,
        fused=analysis.fuses,
        hosts=_count_hosts([rank.device for rank in plan.ranks]),
        blocks=_stage_of_blocks(plan),
        states=list(analysis.states),
        cuts=plan.named_cuts,
        warnings=list(plan.warnings),
        weights=_weight_entries(plan),
        candidates=[
            CandidateEntry(
                way.name, round(way.latency, 9), round(way.interval, 9), [*way.peaks], way.placement, way.refused
            )
            for way in plan.alternatives
        ],
        choice=plan.choice,
        batch_groups=plan.groups,
        weights_at=plan.weights_at,
        placed={weight.name or "": own.device for own in analysis.partition.placed for weight in own.weights},
        **plan.split.file_fields(),
    )


def _rank_entry(rank: RankPlan) -> RankEntry:
    memory = rank.memory
    return RankEntry(
        str(rank.device),
        rank.budget,
        rank.group,
        rank.share,
        memory.weights,
        memory.activations,
        memory.cache,
        memory.total,
        round(rank.seconds, 9),
        rank.rematerialized,
        rank.limited,
    )


def _weight_entries(plan: Plan) -> dict[str, WeightEntry]:
    """What is done with each weight of LISTED bytes and more."""
    analysis = plan.analysis
    weights: dict[str, WeightEntry] = {}
    splits = {weight.name: f"whole: {weight.reason}" if weight.reason else weight.units for weight in plan.weights}
    splits |= {weight.name or "": "placed" for placed in analysis.partition.placed for weight in placed.weights}
    for number, rank in enumerate(plan.ranks):
        for weight in analysis.costs.weights(rank.stage.nodes):
            size = analysis.costs.value_bytes(weight)
            if size >= LISTED and not is_slot_input(weight):
                name = weight.name or ""
                entry = weights.setdefault(name, WeightEntry(size, [], splits.get(name, "whole")))
                entry.ranks.append(number)
    return weights


def _stage_of_blocks(plan: Plan) -> dict[str, int]:
    """The number of each block's stage."""
    numbered = ((block, number) for number, stage in enumerate(plan.stages) for block in stage.blocks)
    return {block.name: number for block, number in numbered if block.kind != PLACED}


def _lists(analysis: Analysis, shapes: Mapping[str, Shape]) -> dict[str, list[int]]:
    """The shapes of the model's own inputs."""
    return {name: list(shape) for name, shape in shapes.items() if name not in analysis.added}


def write_plan(plan: Plan, path: Path) -> None:
    """Write plan.json atomically. Raises MisuseError when it can't be written."""
    with written_whole(path) as file:
        file.write(indented(to_file(plan)))


def read_plan(path: Path) -> PlanFile:
    """Read plan.json. Raises MisuseError if the file is missing, is no plan of one model, or has a duplicate key."""
    content = read_json(path)
    if isinstance(content, dict) and "modules" in content:
        raise MisuseError(f"{path} is the plan of a folder of models: name the folder, not one of its models")
    try:
        return msgspec.convert(content, PlanFile)
    except msgspec.ValidationError as error:
        raise MisuseError(f"{path} is no plan: {error}") from error


def read_json(path: Path) -> Any:
    """The content of plan.json. Raises MisuseError if the file is missing, is not JSON, or has a duplicate key."""
    if path.is_char_device():  # /dev/zero has no end
        raise MisuseError(f"{path} is no plan: it is a device")
    try:
        return parse_json(path.read_bytes(), f"{path} is no plan", _without_duplicates)
    except FileNotFoundError:
        raise MisuseError(f"no such plan: {path}") from None
    except OSError as error:
        raise MisuseError(f"{path} is no plan: {error}") from error
    except _Duplicate as error:
        raise MisuseError(f'{path} has the line "{error.args[0]}" twice') from None


class _Duplicate(Exception):
    """A key that occurs twice in one object. json would silently keep the last one."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _Duplicate(f"{key}: {value}")
        result[key] = value
    return result


def _count_hosts(devices: Sequence[Device]) -> int:
    return max(1, len(host_numbers(devices)))


def check_devices(file: PlanFile, devices: Sequence[Device]) -> None:
    """Raise MisuseError, which names the line, if the ranks' `devices` are not on as many hosts as the file says.

    Also for a device that two ranks have: each would assume the whole budget.
    """
    for number, device in enumerate(devices):
        if device in devices[:number]:
            raise MisuseError(
                f'the plan has the line "device: {device}" for the ranks {devices.index(device)} and {number}: give '
                "each rank a device of its own"
            )
    count = _count_hosts(devices)
    if file.hosts not in (None, count):
        named = ", ".join(f"host{number}" for number in host_numbers(devices)) or "no host"
        raise MisuseError(
            f'the plan has the line "hosts: {file.hosts}", and its ranks\' devices name {named}: give it {count}, or '
            'edit the devices, as in "device": "host1/cuda0"'
        )


def check_entries(file: PlanFile) -> None:
    """Raise MisuseError, which names the line, for entries that are invalid for any model."""
    if file.objective not in OBJECTIVES:
        raise MisuseError(f'the plan has the line "objective: {file.objective}": there are {", ".join(OBJECTIVES)}')
    if file.weights_at not in (HOST, DISK):
        raise MisuseError(f'the plan has the line "weights_at: {file.weights_at}": there are {HOST}, {DISK}')
    if file.row_min is not None and file.row_min < 1:
        raise MisuseError(f'the plan has the line "row_min: {file.row_min}": the least side of a matrix is 1')
    for key in ("shapes", "min_shapes", "opt_shapes"):
        for name, shape in getattr(file, key).items():
            if not all(map(check_size, shape)):
                raise MisuseError(
                    f'the plan has the line "{name}: {shape}" under "{key}": sizes go from 0 to {LARGEST:,}'
                )
    for number, rank in enumerate(file.ranks):
        where = f"of rank {number} ({rank.device})"
        if not 0 <= rank.share < math.inf:  # neither is NaN
            raise MisuseError(f'the plan has the line "share: {rank.share}" {where}: a share is a number from 0 on')
        if not 0 <= rank.stage < len(file.ranks):
            raise MisuseError(
                f'the plan has the line "stage: {rank.stage}" {where}: stages are numbers from 0 to '
                f"{len(file.ranks) - 1}"
            )


def check_stages(ranks: Sequence[RankEntry], stages: Sequence[int], why: str) -> None:
    """Raise MisuseError, which names the line and says `why`, for a rank in another stage than these."""
    for number, (rank, stage) in enumerate(zip(ranks, stages, strict=True)):
        if rank.stage != stage:
            raise MisuseError(
                f'the plan has the line "stage: {rank.stage}" of rank {number} ({rank.device}), which is {stage}: {why}'
            )


def check_file_shares(ranks: Sequence[RankEntry], may_be_empty: int = 0) -> None:
    """Raise MisuseError for a share of 0. The first `may_be_empty` ranks may have one."""
    for number, rank in enumerate(ranks[may_be_empty:], may_be_empty):
        if rank.share == 0:
            raise MisuseError(
                f'the plan has the line "share: {rank.share}" of rank {number} ({rank.device}): remove the rank instead'
            )
