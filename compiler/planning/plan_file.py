"""`plan.json`: the plan as a file that a person may edit. To move a block, change its number under `blocks`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from splitc.compiler.analysis.facts import Analysis, analyze
from splitc.compiler.frontend.shapes import Shape
from splitc.compiler.modes import row as plan_row
from splitc.compiler.modes import tensor as plan_tensor
from splitc.compiler.modes.layer import make_plan
from splitc.compiler.modes.row import make_row_plan
from splitc.compiler.modes.tensor import make_tensor_plan
from splitc.compiler.planning.budgets import block_seconds
from splitc.compiler.planning.plan import Plan, Repeated, Request, check_memory
from splitc.compiler.planning.stage_search import Assignment
from splitc.compiler.sharding.row_split import LEAST_SIDE
from splitc.runtime.devices import parse_devices
from splitc.runtime.errors import DoesNotFitError, MisuseError
from splitc.runtime.files import written_whole
from splitc.runtime.manifest import Source, State
from splitc.runtime.package_files import hash_file
from splitc.runtime.units import format_bytes

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
    repeated: Repeated | None = None


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
                rank.repeated,
            )
            for rank in plan.ranks
        ],
        finest=analysis.partition.finest,
        blocks={block.name: number for number, stage in enumerate(stages) for block in stage.blocks},
        states=list(analysis.states),
        row_min=plan.rows.least if plan.rows is not None else None,
        cuts=[CutEntry(cut.bytes, [value.name or "" for value in cut.values]) for cut in plan.cuts],
        warnings=list(plan.warnings),
        weights=weights,
        candidates=[
            CandidateEntry(each.name, round(each.latency, 9), round(each.interval, 9), list(each.peaks), each.refused)
            for each in plan.candidates
        ],
        choice=plan.choice,
    )


def _lists(shapes: Mapping[str, Shape]) -> dict[str, list[int]]:
    return {name: list(shape) for name, shape in shapes.items()}


def _shapes(lists: Mapping[str, list[int]]) -> dict[str, Shape]:
    return {name: tuple(shape) for name, shape in lists.items()}


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


# As many blocks as no model has: asks for the finest ones.
ALL = 1 << 30


def plan_from_file(model: Path, path: Path) -> Plan:
    """The plan that a file describes, for the model that it was made for.

    Raises MisuseError when the file is no plan or contradicts the model, CannotSplitError when its shares leave a rank
    with nothing, DoesNotFitError when a rank needs more than its budget.
    """
    file = read_plan(path)
    if file.schema != SCHEMA:
        raise MisuseError(
            f"{path} has schema version {file.schema}, and this splitc reads version {SCHEMA}: plan again"
        )
    if model.is_file() and hash_file(model) != file.source.sha256:
        raise MisuseError(
            f"{path} was made for another model ({file.source.name}, SHA-256 {file.source.sha256[:12]}...)"
        )
    request = Request(
        split_mode=file.split_mode,
        engine=file.engine,
        objective=file.objective,
        shapes=_shapes(file.shapes),
        min_shapes=_shapes(file.min_shapes),
        opt_shapes=_shapes(file.opt_shapes),
        pipeline_stages=1 + max((rank.stage for rank in file.ranks), default=0),
        row_min=LEAST_SIDE if file.row_min is None else file.row_min,
        settings=file.settings,
    )
    analysis = analyze(model, request.asked_shapes, ALL if file.finest else 1, file.settings)
    stages = request.pipeline_stages
    if file.states is not None:
        analysis = replace(analysis, states=tuple(_check_states(analysis, file.states)))
    chosen = assignments(file.blocks, stages, [block.name for block in analysis.partition.blocks])
    devices = parse_devices([rank.device for rank in file.ranks])
    budgets = [rank.budget_bytes for rank in file.ranks]
    shares = [rank.share for rank in file.ranks]
    if file.split_mode == "row":
        _check_shares(file)
        plan = make_row_plan(analysis, devices, budgets, shares, request)
        check_memory(plan, plan_row.WHOLE)
        return plan
    seconds = block_seconds(analysis, devices, request)
    if file.split_mode == "tensor":
        _check_groups(file, stages)
        plan = make_tensor_plan(analysis, devices, budgets, shares, chosen, seconds, request)
        check_memory(plan, plan_tensor.WHOLE)
        return plan
    used = [devices[each.target] for each in chosen]
    plan = make_plan(analysis, used, chosen, budgets, seconds, request)
    for rank in plan.ranks:
        if rank.missing:
            need, have = format_bytes(rank.memory.total), format_bytes(rank.budget)
            first, last = rank.stage.blocks[0].name, rank.stage.blocks[-1].name
            raise DoesNotFitError(
                f"{path} puts {first} to {last} on {rank.device}, which needs {need} and may use {have}: "
                "move blocks to other ranks, or raise its budget_bytes"
            )
    return plan


def _check_states(analysis: Analysis, states: Sequence[State]) -> Sequence[State]:
    """Raise MisuseError for a state that names no input or output of the model, or an input twice."""
    inputs = [value.name for value in analysis.graph.graph.inputs]
    outputs = [value.name for value in analysis.graph.outputs]
    for number, state in enumerate(states):
        if state.input not in inputs or state.output not in outputs:
            raise MisuseError(f"the plan has the state {state.input} <- {state.output}: the model lacks one of these")
        if state.input in [other.input for other in states[:number]]:
            raise MisuseError(f"the plan has two states for the input {state.input}")
    return states


def _check_groups(file: PlanFile, stages: int) -> None:
    """Raise MisuseError unless the plan's ranks are groups of one size, in the order of their stages."""
    numbers = [rank.stage for rank in file.ranks]
    count = len(numbers) // stages
    if numbers != [stage for stage in range(stages) for _ in range(count)] or count < 2:
        raise MisuseError(
            f"the plan's ranks have the stages {numbers}: tensor mode wants groups of one size, two or more, in order"
        )
    _check_shares(file)


def _check_shares(file: PlanFile) -> None:
    """Raise MisuseError for a share of nothing or less; only the main rank of row mode may have none."""
    held = file.ranks[1:] if file.split_mode == "row" else file.ranks
    if any(rank.share <= 0 for rank in held) or any(rank.share < 0 for rank in file.ranks):
        raise MisuseError("the plan has a rank with a share of 0 or less: take it out instead")


def assignments(blocks: Mapping[str, int], stages: int, names: Sequence[str]) -> list[Assignment]:
    """The stages that the plan's blocks make. Raises MisuseError naming the line that contradicts the model."""
    for name, rank in blocks.items():
        if name not in names:
            raise MisuseError(f'the plan has the line "{name}: {rank}", and the model has no such block')
        if not 0 <= rank < stages:
            raise MisuseError(f'the plan has the line "{name}: {rank}", and it has stages 0 to {stages - 1}')
    if missing := [name for name in names if name not in blocks]:
        raise MisuseError(f'the plan leaves out the block {missing[0]}: add a line for it under "blocks"')
    found: list[Assignment] = []
    for index, name in enumerate(names):
        rank = blocks[name]
        last: Assignment | None = found[-1] if found else None
        if last and rank < last.target:
            raise MisuseError(
                f'the plan has the line "{name}: {rank}" after a block in stage {last.target}: '
                "stages hold consecutive blocks, in their order"
            )
        if last and rank == last.target:
            found[-1] = Assignment(rank, last.start, index + 1)
        else:
            found.append(Assignment(rank, index, index + 1))
    return found
