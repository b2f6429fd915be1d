"""Predicts the memory of a stage: weights, caches, and the peak of activations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from splitc.compiler.adapters.slots import is_slot_input
from splitc.compiler.analysis.costs import Costs
from splitc.compiler.analysis.loading import Loading, find_loading, packed_bytes
from splitc.compiler.analysis.stages import Stage
from splitc.compiler.execution.exchange import EngineGraph, NodeShapes, Round
from splitc.compiler.execution.run import arena_bytes
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.remembered import remembered
from splitc.compiler.states.own_sizes import is_fused_cache
from splitc.runtime.package.states import State


@dataclass(frozen=True)
class Held:
    """The bytes of a rank's shards: of `weights` (see `Costs.held`), and, by the function `size`, of computed values.

    - `shapes`: returns the shapes of a node's inputs and outputs on the rank.
    - `summed`: maps all-reduced values to the rank's summands.
    - `rounds`: the rounds of a rank in row mode.
    """

    weights: Mapping[ir.Value, int]
    size: Callable[[ir.Value], int]
    shapes: NodeShapes
    summed: Mapping[ir.Value, ir.Value] = field(default_factory=dict)
    rounds: Sequence[Round] = ()


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage.

    - `cache`: the states' inputs and outputs. A state that is always overwritten in place counts once.
    - `activations`: all other values, the kernels' scratch, and the allocator's waste. `passed`: the inputs and outputs
      among them.
    - `loading`: the memory of weights while they are loaded.
    - `engines`: the memory of the engines' libraries, and a margin for the error of predictions.
    - `in_files`: the part of the weights that stays in mapped files (`Costs.in_files`).
    - `nodes`: the number of nodes that its engines run.
    - `few_bits`: whether some weights have fewer than 32 bits.
    - `sums`: the A and B of a sum of adapters, of the planned rank.
    - `adapters`: the additional memory for requests with adapters: `sums`, and the engines with slots, which have
      activations and, on CPUs, weights of their own.
    """

    weights: int
    activations: int
    cache: int
    loading: Loading = Loading()
    engines: int = 0
    in_files: int = 0
    passed: int = 0
    sums: int = 0
    adapters: int = 0
    nodes: int = 0
    few_bits: bool = False

    @property
    def held_weights(self) -> int:
        """The bytes of weights in memory, without those in mapped files."""
        return self.weights - self.in_files

    @property
    def values(self) -> int:
        """The peak bytes of weights and values, while loading or while running, without adapters."""
        return max(self.held_weights + self.activations + self.cache, self.loading.most)

    @property
    def total(self) -> int:
        """The peak bytes, while loading or while running."""
        return self.values + self.engines + self.adapters


def stage_memory(costs: Costs, states: Sequence[State], stage: Stage, held: Held | None = None) -> StageMemory:
    """Predict a rank's memory with the bound shapes: of a whole stage, or of the shards in `held`."""
    return _whole_memory(costs, tuple(states), stage) if held is None else _memory(costs, states, stage, held)


@remembered
def _whole_memory(costs: Costs, states: Sequence[State], stage: Stage) -> StageMemory:
    """The memory of a whole stage; cached, since the search over cuts and the plan both need it."""
    return _memory(costs, states, stage, Held(costs.held(stage.nodes), costs.value_bytes, costs.shapes_of))


def _memory(costs: Costs, states: Sequence[State], stage: Stage, held: Held) -> StageMemory:
    """See `stage_memory`.

    Inputs are held for the whole run, as in ONNX Runtime with an IO binding. Nodes' outputs are allocated in its arena,
    in its order (see `arena_bytes`). This includes states, which count as cache; the arena's waste around them counts
    as activations.
    """
    names, over = state_names(states), overwritten(states)
    ends = dict.fromkeys([*stage.takes, *stage.gives])
    weights, size, shapes = held.weights, held.size, held.shapes
    running = [node for node in stage.nodes if node not in costs.graph.folded]
    made = {value for node in running for value in node.outputs}
    made.update(value for one in held.rounds for value in one.takes)
    reads = costs.graph.reads.__getitem__

    def scratch(node: ir.Node) -> tuple[int, ...]:
        whole, result = costs.scratch(node), costs.value_bytes(node.outputs[0])
        if not result:
            return whole
        # The rank's node has other numbers of heads than the model's.
        attends, own = operator_of(node).is_attention, size(node.outputs[0])
        return tuple([b * own // result for b in whole]) if attends else costs.scratch_of(node, *shapes(node))

    def computed(value: ir.Value) -> int:
        return costs.value_in_memory(value, size(value), value in ends) if value in made else 0

    states_made = sum(size(value) for value in ends if value in made and value.name in names)
    kept, alike = frozenset(stage.gives), costs.graph.are_alike
    graph = EngineGraph(running, reads, computed, kept, alike, held.summed, held.rounds, size, shapes)
    arena = arena_bytes(graph, scratch, costs.maps_weights)
    given = sum(size(value) for value in ends if value in made and value.name not in names)
    fed = sum(size(value) for value in ends if value.name not in names and value not in made)
    cast = _cast_tables(costs, running, held)
    single = 2 * sum(weights[value] for value in cast)  # folded, and in no file: held from the beginning of a load on
    memory = StageMemory(
        weights=packed_bytes(costs, running, weights, shapes) + sum(weights[value] for value in cast),
        activations=fed + max(arena - states_made, given),
        # If requests may feed a past without spare capacity, the engine allocates a present beside it.
        cache=sum(size(v) for v in ends if v.name in names and (v.name not in over or is_fused_cache(v))),
        loading=find_loading(costs, stage.nodes, weights, shapes).beside(single),
        passed=fed + given,
        nodes=costs.count_run(stage.nodes),
        few_bits=have_few_bits(weights),
        in_files=sum(costs.left_in_file(value, own) for value, own in weights.items() if value not in cast),
    )
    return with_adapters(memory, costs, weights)


def _cast_tables(costs: Costs, nodes: Iterable[ir.Node], held: Held) -> frozenset[ir.Value]:
    """Float16 tables of which the rank has only some rows: engines on CPUs hold them in float32, not in the file.

    The indices of rows are computed, and other ranks' rows masked, by nodes without float16 kernels. Between two such
    nodes ONNX Runtime runs no float16 kernel (IsIsolatedFp16NodeOnCpu in core/optimizer/insert_cast_transformer.cc).
    """
    return frozenset(
        table
        for node in nodes
        for _, place in operator_of(node).lookups
        if (table := node.inputs[place]) in costs.in_files and table is not None
        if table.dtype == ir.DataType.FLOAT16 and held.shapes(node)[0][place][0] < costs.shapes_of(node)[0][place][0]
    )


def have_few_bits(weights: Iterable[ir.Value]) -> bool:
    """Whether some of these weights have fewer than 32 bits: small integers, or half precision."""
    types = {weight.dtype for weight in weights} - {None, ir.DataType.BOOL, ir.DataType.STRING}
    return any(dtype is not None and dtype.bitwidth < 32 for dtype in types)


def with_adapters(memory: StageMemory, costs: Costs, weights: Mapping[ir.Value, int]) -> StageMemory:
    """The memory of a stage with slots: A and B, which `weights` include, are moved to the adapters' memory."""
    sums = sum(size for weight, size in weights.items() if is_slot_input(weight))
    own = replace(memory, weights=memory.weights - sums, sums=sums)
    return replace(own, adapters=adapter_bytes(own, costs.maps_weights))


def adapter_bytes(memory: StageMemory, packs: bool) -> int:
    """The additional bytes for requests with adapters: a sum of adapters, and a second engine with slots.

    The second engine has activations of its own. If engines pack weights (`packs`), as on CPUs, it has weights of its
    own too; on GPUs both engines share them.
    """
    if not memory.sums:
        return 0
    running = memory.activations - memory.passed
    return memory.sums + (max(memory.held_weights + running, memory.loading.most) if packs else running)


def state_names(states: Iterable[State]) -> frozenset[str]:
    """The names of all inputs and outputs that are states."""
    return frozenset(name for state in states for name in (state.input, state.output))


def overwritten(states: Iterable[State]) -> frozenset[str]:
    """The names of the states' inputs that the engine overwrites with the outputs."""
    return frozenset(state.input for state in states if state.in_place)
