"""What is placed on devices of its own, in layer mode: its ranks' memory and time, and what goes there and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir

from splitc.compiler.analysis.blocks import Placed
from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.analysis.memory import Held, StageMemory, stage_memory
from splitc.compiler.analysis.stages import Stage
from splitc.compiler.lowering.transfers import Transfer, find_teams
from splitc.compiler.placement.placed import with_placed
from splitc.compiler.planning.clock import Clock, Prediction, find_pace
from splitc.compiler.planning.rank_plan import CutPlan, RankPlan
from splitc.compiler.planning.resources import Resources
from splitc.runtime.hardware.devices import Device, threads_for


def take_placed(
    analysis: Analysis, devices: Sequence[Device], placed: Mapping[ir.Value, str]
) -> tuple[Analysis, list[int]]:
    """The analysis with placed weights out of the blocks, and the numbers of the devices that have blocks.

    Devices with placed weights have no blocks. If all have some, the first one has the blocks, and what was
    placed there stays in them.
    """
    names = [str(device) for device in devices]
    places = [place for place, name in enumerate(names) if name not in placed.values()] or [0]
    elsewhere = {weight: name for weight, name in placed.items() if names.index(name) not in places}
    return with_placed(analysis, elsewhere), places


def place_of(placed: Placed, devices: Sequence[Device]) -> int:
    """The number of the device of what is placed."""
    return [str(device) for device in devices].index(placed.device)


def placed_seconds(analysis: Analysis, resources: Resources, place: int, stage: Stage) -> float:
    """The estimated seconds of a stage on the device at a place, which works while the others wait."""
    threads = threads_for(resources.devices, resources.threads)
    return find_pace(resources.devices[place], threads, 1, resources.machine).seconds(analysis.costs, stage.nodes)


def rank_memory(analysis: Analysis, stage: Stage, number: int, transfers: Sequence[Transfer]) -> StageMemory:
    """A rank's memory. What comes or goes while it runs is held only until its last reader, on whichever rank, has run.

    So the nodes of all ranks are gone through, and what this one does not have takes nothing.
    """
    costs = analysis.costs
    own = [transfer for transfer in transfers if transfer.inside and transfer.has(number)]
    if not own:
        return stage_memory(costs, analysis.states, stage)
    here = {*stage.takes, *(value for node in stage.nodes for value in node.outputs)}
    passing = {transfer.value for transfer in own}
    all_run = replace(
        stage,
        nodes=costs.graph.nodes,
        receives=tuple(value for value in stage.receives if value not in passing),
        sends=tuple(value for value in stage.sends if value not in passing),
    )
    return stage_memory(
        costs,
        analysis.states,
        all_run,
        Held(costs.held(stage.nodes), lambda value: costs.value_bytes(value) if value in here else 0),
    )


def detour_cuts(analysis: Analysis, transfers: Sequence[Transfer], first: int, count: int) -> list[CutPlan]:
    """For each rank from number `first` on what crosses between it and all others, in both directions."""
    cuts = []
    for number in range(first, count):
        values = [transfer.value for transfer in transfers if transfer.has(number)]
        cuts.append(CutPlan(tuple(dict.fromkeys(values)), sum(map(analysis.costs.value_bytes, values)), True))
    return cuts


def predict_detours(
    ranks: Sequence[RankPlan], transfers: Sequence[Transfer], clock: Clock, seconds: Callable[[RankPlan], float]
) -> Prediction:
    """The times of ranks with detours between them, whose own `seconds` are known.

    The ranks of a team work one after the other, and in a stream teams work side by side.
    """
    team = find_teams(len(ranks), transfers)
    busy = dict.fromkeys(team.values(), 0.0)
    for number, rank in enumerate(ranks):
        busy[team[number]] += seconds(rank)
    for transfer in transfers:
        source, target = ranks[transfer.source], ranks[transfer.target]
        size = clock.analysis.costs.value_bytes(transfer.value)
        took = clock.copy(source, target).seconds(size) + clock.cold(source)
        if transfer.inside and not clock.operators:
            took += clock.start(target)
        busy[team[transfer.target]] += took
    return Prediction(sum(busy.values()), max(busy.values()))
