"""Measured blocks (`--profile`): in the plan, their measured memory replaces predictions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from splitc.compiler.analysis.blocks import Block
from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.analysis.memory import StageMemory, stage_memory
from splitc.compiler.analysis.stages import Stage, divide_blocks
from splitc.compiler.planning.assembly import engine_bytes
from splitc.compiler.planning.resources import Resources
from splitc.compiler.remembered import remembered
from splitc.runtime.engines.kinds import ONNXRUNTIME


@dataclass(frozen=True)
class Activations:
    """Bytes of a block's activations, scratch and the allocator's waste: predicted, and measured."""

    predicted: int
    measured: int


def single_blocks(analysis: Analysis) -> list[Stage]:
    """Each block as a stage of its own."""
    blocks = len(analysis.partition.blocks)
    return divide_blocks(analysis.graph, analysis.partition, range(1, blocks + 1))[:blocks]


def block_activations(analysis: Analysis, resources: Resources, place: int) -> Sequence[Activations] | None:
    """The activations of each block on the device at `place`; None if blocks are not measured.

    Measured activations are the memory of the block when it runs alone, less its weights, its states and the engine's
    own memory.
    """
    measured = resources.measured(analysis, place)
    if measured is None:
        return None
    device = resources.devices[place]
    activations = []
    for own, memory in zip(measured, _predicted(analysis), strict=True):
        engine = engine_bytes(device, [device], ONNXRUNTIME, memory=memory)
        beside = memory.weights + memory.sums - memory.in_files + memory.cache + engine
        activations.append(Activations(memory.activations, max(0, own.bytes - beside)))
    return activations


@remembered
def _predicted(analysis: Analysis) -> list[StageMemory]:
    return [stage_memory(analysis.costs, analysis.states, stage) for stage in single_blocks(analysis)]


def beyond_predicted(blocks: Sequence[Activations]) -> int:
    """The largest measured activations of some blocks, less the largest predicted ones, in bytes.

    For several blocks it is at least 0: in one arena, different blocks waste more memory than one of them alone.
    """
    most = max((block.measured for block in blocks), default=0)
    more = most - max((block.predicted for block in blocks), default=0)
    return more if len(blocks) == 1 else max(0, more)


def as_measured(
    analysis: Analysis, resources: Resources, place: int, blocks: Iterable[Block], memory: StageMemory
) -> StageMemory:
    """The memory of a rank with these blocks, or shards of them, with the measured peak instead of the predicted one.

    A shard is not measured: it gets its share of the bytes that exceed the prediction.
    """
    activations = block_activations(analysis, resources, place)
    if activations is None:
        return memory
    number = {block: number for number, block in enumerate(analysis.partition.blocks)}
    own = [activations[number[block]] for block in blocks if block in number]
    whole = max((block.predicted for block in own), default=0)
    more = beyond_predicted(own)
    if 0 < memory.activations < whole:
        more = max(0, more) * memory.activations // whole
    return replace(memory, activations=max(0, memory.activations + more))
