"""Makes the plan that a plan.json describes, which a user may have edited."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import msgspec
import onnx_ir as ir

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.modes.asked import analyze_for
from splitc.compiler.modes.replicas import replan_in_groups
from splitc.compiler.modes.table import BATCH, find_mode
from splitc.compiler.placement.placed import with_placed
from splitc.compiler.placement.weights import weight_uses
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.plan_file import SCHEMA, PlanFile, check_devices, check_entries, read_plan
from splitc.compiler.planning.resources import Resources
from splitc.compiler.planning.stage_search import Assignment
from splitc.compiler.request.request import PLACING, ROW_MIN, WHY_NOT_PLACED, Request
from splitc.compiler.request.shapes import AskedStates, Shape
from splitc.compiler.states.states import find_states
from splitc.runtime.errors import MisuseError
from splitc.runtime.hardware.devices import parse_devices
from splitc.runtime.package.files import hash_file
from splitc.runtime.package.states import State

# A number of blocks that no model has: wanting that many gives the finest ones.
ALL = 1 << 30


def plan_from_file(model: Path, path: Path, trusts_data: bool = False) -> Plan:
    """The plan of a file: see `replan`. Raises MisuseError if it is no plan."""
    return replan(model, read_plan(path), path, trusts_data)


def replan(model: Path, file: PlanFile, path: Path, trusts_data: bool = False) -> Plan:
    """The plan that a file describes, for the model that it was made for. `path` is the file, for messages.

    With `trusts_data`, which a plan does not store, the model's external data may lie outside its folder. Raises
    MisuseError if the file contradicts the model, CannotSplitError if its shares leave a rank with nothing,
    DoesNotFitError if a rank needs more than its budget.
    """
    if file.schema != SCHEMA:
        raise MisuseError(
            f"{path} has schema version {file.schema}, and this splitc reads version {SCHEMA}: plan again"
        )
    if model.is_file() and hash_file(model) != file.source.sha256:
        raise MisuseError(
            f"{path} was made for another model ({file.source.name}, SHA-256 {file.source.sha256[:12]}...)"
        )
    check_entries(file)
    mode = find_mode(file.split_mode)
    request = _request(file, trusts_data)
    wanted = ALL if file.finest else 1
    devices = parse_devices([rank.device for rank in file.ranks])
    analysis = analyze_for(model, devices, request, wanted, _asked_states(file))
    stages = request.pipeline_stages
    _check_shapes(analysis, file)
    if file.states is not None:
        analysis = replace(analysis, states=tuple(_with_growth(analysis, file.states)))
    analysis = with_placed(analysis, _check_placed(analysis, file))
    names = [block.name for block in analysis.partition.blocks]
    _check_blocks(analysis, file, names)
    chosen = assignments(file.blocks, stages, names)
    check_devices(file, devices)
    resources = Resources(tuple(devices), tuple(rank.budget_bytes for rank in file.ranks))
    return replan_in_groups(mode, analysis, resources, request, file, chosen)


def _request(file: PlanFile, trusts_data: bool) -> Request:
    """The request for which the plan of a file is made again."""
    return Request(
        split_mode=file.split_mode,
        engine=file.engine,
        objective=file.objective,
        shapes=_shapes(file.shapes),
        min_shapes=_shapes(file.min_shapes),
        opt_shapes=_shapes(file.opt_shapes),
        pipeline_stages=1 + max((rank.stage for rank in file.ranks), default=0),
        row_min=ROW_MIN if file.row_min is None else file.row_min,
        settings=file.settings,
        trust_external_data=trusts_data,
        no_fuse=not file.fused,
        lora=tuple((entry.file, entry.scale) for entry in file.lora),
        lora_slots=file.lora_slots,
        weights_at=file.weights_at,
        batch_groups=1 if file.split_mode == BATCH else file.batch_groups,
        memory=[f"{rank.device}={rank.budget_bytes}" for rank in file.ranks if rank.limited],
    )


def _check_shapes(analysis: Analysis, file: PlanFile) -> None:
    """Raise MisuseError for an input without a line, and for a size of 0 of an input that is no state.

    Inputs that could be states count as states, such as a cache that the plan leaves to the caller.
    """
    shapes, states = file.shapes, {state.input for state in (*analysis.states, *find_states(analysis.graph))}
    for value in analysis.graph.graph.inputs:
        name = value.name or ""
        if name not in shapes and name not in analysis.added:
            raise MisuseError(f'the plan leaves out the input {name}: add a line for it under "shapes"')
        if 0 in shapes.get(name, ()) and name not in states:
            raise MisuseError(
                f'the plan has the line "{name}: {list(shapes[name])}" under "shapes": there is nothing to plan for '
                "with a size of 0"
            )


def _check_placed(analysis: Analysis, file: PlanFile) -> dict[ir.Value, str]:
    """The placed weights with their devices.

    Raises MisuseError for an unknown weight, a device that has blocks, or a mode that places none.
    """
    weights = {weight.name: weight for weight in weight_uses(analysis.graph)}
    size = len(file.ranks) // max(1, file.batch_groups)
    devices = [rank.device for rank in file.ranks[:size]]
    for name, device in file.placed.items():
        line = f'the plan has the line "{name}: {device}" under "placed"'
        if file.split_mode not in PLACING:
            raise MisuseError(f"{line}{WHY_NOT_PLACED}")
        if name not in weights:
            raise MisuseError(f"{line}, and the model has no such weight")
        if device not in devices[1 + max(file.blocks.values(), default=0) :]:
            raise MisuseError(f"{line}: placed weights go to ranks without blocks, which come after those with blocks")
    return {weights[name]: device for name, device in file.placed.items()}


def _shapes(lists: Mapping[str, list[int]]) -> dict[str, Shape]:
    return {name: tuple(shape) for name, shape in lists.items()}


def _asked_states(file: PlanFile) -> AskedStates:
    """The states of the plan, and no others. Raises MisuseError for an input that is two states."""
    if file.states is None:
        return AskedStates()
    outputs = {state.input: state.output for state in file.states}
    if len(outputs) < len(file.states):
        inputs = [state.input for state in file.states]
        twice = next(name for number, name in enumerate(inputs) if name in inputs[:number])
        raise MisuseError(f"the plan has two states for the input {twice}")
    return AskedStates(outputs, alone=True, where="the plan's state")


def _check_blocks(analysis: Analysis, file: PlanFile, names: Sequence[str]) -> None:
    """Raise MisuseError if the model's blocks differ from the plan's because a cache is missing among its states."""
    left = {state.input for state in find_states(analysis.graph)} - {state.input for state in analysis.states}
    if left and file.fused and set(file.blocks).isdisjoint(names):
        raise MisuseError(
            f"the plan leaves out the state of {min(left)}, and the model has other blocks then, as this cache is not "
            "written in place: plan again, with --no-state and --state, or with --no-fuse"
        )


def _with_growth(analysis: Analysis, states: Sequence[State]) -> Iterator[State]:
    """The analysis' states, with the plan's growing axes. Raises MisuseError for an axis that a state does not have."""
    grows = {state.input: state.grows for state in states}
    for state in analysis.states:
        rank, axis = len(analysis.shapes[state.input]), grows[state.input]
        if axis is not None and not 0 <= axis < rank:
            raise MisuseError(
                f"the plan has the state {state.input} <- {state.output}, which grows along axis {axis}: it has "
                f"the axes 0 to {rank - 1}"
            )
        yield msgspec.structs.replace(state, grows=axis)


def assignments(blocks: Mapping[str, int], stages: int, names: Sequence[str]) -> list[Assignment]:
    """The stages' ranges of blocks. Raises MisuseError, which names the line that contradicts the model."""
    for name, rank in blocks.items():
        if name not in names:
            raise MisuseError(f'the plan has the line "{name}: {rank}", and the model has no such block')
        if not 0 <= rank < stages:
            raise MisuseError(f'the plan has the line "{name}: {rank}", and it has stages 0 to {stages - 1}')
    if missing := [name for name in names if name not in blocks]:
        raise MisuseError(f'the plan leaves out the block {missing[0]}: add a line for it under "blocks"')
    runs: list[Assignment] = []
    start = 0
    for stage, own in groupby(names, blocks.__getitem__):
        if runs and stage < runs[-1].target:
            raise MisuseError(
                f'the plan has the line "{names[start]}: {stage}" after a block in stage {runs[-1].target}: '
                "stages hold consecutive blocks, in their order"
            )
        runs.append(Assignment(stage, start, start + len(list(own))))
        start = runs[-1].end
    return runs
