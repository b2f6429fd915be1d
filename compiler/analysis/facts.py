"""The analysis of a model: all that is known of it before anything is decided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from splitc.compiler.adapters.merged_weights import Merged, merge
from splitc.compiler.adapters.slots import Grafted, find_slots, graft_slots, planned_rank
from splitc.compiler.analysis.acceptance import check_accepted, refusals_first
from splitc.compiler.analysis.blocks import Partition, find_blocks
from splitc.compiler.analysis.costs import Costs
from splitc.compiler.analysis.passed_types import check_ends
from splitc.compiler.caches.preamble import Preamble
from splitc.compiler.fusion.fuse import Fused, Outcome, fuse
from splitc.compiler.fusion.kept_rows import Chosen
from splitc.compiler.graphs.optional import defaults_hidden
from splitc.compiler.inference.folding import take_branches
from splitc.compiler.inference.shapes import BoundShapes, infer_shapes, read_symbols, reconcile
from splitc.compiler.normal_form.constants import fold_constants
from splitc.compiler.normal_form.graph import Graph, complete, open_graph
from splitc.compiler.normal_form.normalize import name_apart
from splitc.compiler.normal_form.plain_forms import use_plain_forms
from splitc.compiler.patterns.kernels import Gains
from splitc.compiler.reading.loading import read_model
from splitc.compiler.remembered import remembered
from splitc.compiler.request.shapes import AskedShapes, AskedStates, Shape, check_order
from splitc.compiler.sizes.fitting import Fitted, fit_sizes
from splitc.compiler.sizes.inputs import input_sizes
from splitc.compiler.sizes.numbered import name_numbered_sizes
from splitc.compiler.sizes.tried import LARGEST, Trial
from splitc.compiler.states.states import find_states, growing_symbols, settle_state_sizes, written_in_place
from splitc.runtime.adapters.adapter import Adapter
from splitc.runtime.package.manifest import Slot
from splitc.runtime.package.states import Length, State
from splitc.runtime.threads.progress import counting

# The steps of an analysis that progress bars count: reading, opening, shapes, costs, blocks.
PARTS = 5
# How often forms that follow from others are looked for. JAX's norms take four rounds.
_ROUNDS = 8
# A model with more operations is not run to try its sizes. On one core, these take a second or two.
MOST_FLOPS = 3 * 10**9


@dataclass(frozen=True, eq=False)
class Analysis:
    """A model's graph, its bound input shapes, its costs with these, its states and its blocks.

    - `shapes`: the largest input shapes, which are planned for. Engines with a range of sizes also take the `smallest`
      ones and are tuned for the `typical` ones.
    - `fitted`: how the largest shapes were determined and tried.
    - `gains`: where fused operators are faster; None if nothing is fused.
    - `outcomes`, `lengths`, `preamble`, `uncompared`, `chosen`: the results of fusion, see `Fused`.
    - `slotless`: weights of layers without a slot for adapters, with the reason.
    """

    graph: Graph
    shapes: Mapping[str, Shape]
    smallest: Mapping[str, Shape]
    typical: Mapping[str, Shape]
    costs: Costs
    states: tuple[State, ...]
    partition: Partition
    fitted: Fitted
    gains: Gains | None = None
    outcomes: tuple[Outcome, ...] = ()
    lengths: tuple[Length, ...] = ()
    merged: tuple[Merged, ...] = ()
    slots: tuple[Slot, ...] = ()
    slot_rank: int | None = None
    slotless: Mapping[str, str] = field(default_factory=dict)
    preamble: Preamble | None = None
    uncompared: frozenset[str] = frozenset()
    chosen: Chosen | None = None

    @property
    def fuses(self) -> bool:
        """Whether patterns may be fused."""
        return self.gains is not None

    @property
    def added(self) -> frozenset[str]:
        """The names of inputs that the model does not have, which the runtime feeds."""
        return frozenset(_added_inputs(self))


def analyze(
    path: Path,
    asked: AskedShapes,
    wanted_blocks: int,
    settings: Mapping[str, Any] = MappingProxyType({}),
    trusts_data: bool = False,
    states: AskedStates = AskedStates(),
    gains: Gains | None = None,
    adapters: Sequence[tuple[Adapter, float]] = (),
    slot_rank: int | None = None,
    maps_weights: bool = False,
) -> Analysis:
    """Open and analyze a model. It gets at least `wanted_blocks` blocks if it can be cut that finely.

    - `settings`: inputs that become constants.
    - `trusts_data`: the model's external data may lie outside its folder.
    - `gains`: fuse patterns where that is faster; None does not fuse.
    - `adapters`: are merged into the weights.
    - `slot_rank`: if given, layers get slots for adapters of this rank.
    - `maps_weights`: engines read embedding tables from their mapped files.

    Raises ModelError for a model that `read_model` or ONNX Runtime refuses, MisuseError for shapes, settings, states
    and adapters that do not fit the model.
    """
    done = counting("analyzing the model", PARTS)
    proto, files = read_model(path, trusts_data)
    done(1)
    with refusals_first(path, trusts_data):
        graph = open_graph(path, proto, files, settings, trusts_data)
        rank = planned_rank(slot_rank)
        merged, slots, grafted = merge(graph, adapters), find_slots(graph, rank), Grafted()
        if slot_rank is not None:
            graph, grafted = graft_slots(graph, rank)
            slots = (*slots, *grafted.slots)
        done(1)
        read_symbols(graph.model)
        name_numbered_sizes(graph, {**asked.smallest, **asked.typical, **asked.shapes, **asked.largest})
        graph = _folded(graph)
        check_accepted(graph, proto)  # ONNX Runtime checks all branches
        graph = _decided(graph)
        check_ends(graph)
        settle_state_sizes(graph)
        done(1)
        analysis = _analyze(graph, asked, states, wanted_blocks, gains, done)
    done(1)
    costs = replace(analysis.costs, maps_weights=maps_weights)
    return replace(analysis, costs=costs, merged=merged, slots=slots, slot_rank=slot_rank, slotless=grafted.without)


def _folded(graph: Graph) -> Graph:
    """Infer shapes, and fold what follows from fixed sizes, in place."""
    with defaults_hidden(graph.graph):
        infer_shapes(graph.model, folds=True)
        is_changed = fold_constants(graph.graph)
        for _ in range(_ROUNDS):
            if not use_plain_forms(graph.graph):
                break
            infer_shapes(graph.model, folds=True)
            is_changed = True
        return replace(graph, reads=complete(graph.model)) if is_changed else graph


def _decided(graph: Graph) -> Graph:
    """Take the branches whose conditions are constants, in place."""
    is_changed = False
    with defaults_hidden(graph.graph):
        while take_branches(graph.graph):
            is_changed = True
            name_apart(graph.model)  # two branches may have used one name
            infer_shapes(graph.model, folds=True)
            fold_constants(graph.graph)
    return replace(graph, reads=complete(graph.model)) if is_changed else graph


def _analyze(
    graph: Graph,
    asked: AskedShapes,
    asked_states: AskedStates,
    wanted_blocks: int,
    gains: Gains | None,
    done: Callable[[int], None],
) -> Analysis:
    states = find_states(graph, asked_states)
    growing = growing_symbols(graph, [*find_states(graph), *states])  # caches grow whether or not they are kept
    ignored = [fixed.input for fixed in graph.fixed]
    low, middle, high = (input_sizes(graph.model, given, growing, asked.stated, ignored) for given in asked.three())
    fitted = fit_sizes(graph, high, Trial(graph), lambda bound: _is_small(graph, bound))
    smallest, typical = (sizes.changed(fitted.changes).shapes(graph.model) for sizes in (low, middle))
    largest = fitted.shapes
    check_order(smallest, typical, largest)
    fused = Fused(graph, fitted.bound, ()) if gains is None else fuse(graph, largest, fitted.bound, gains, states)
    graph, costs = fused.graph, Costs(fused.graph, fused.bound)
    states = written_in_place(graph, states)
    smallest, typical, largest = (_with_added(fused, shapes) for shapes in (smallest, typical, largest))
    reconcile(graph.model, costs.bound)
    done(1)
    blocks = find_blocks(graph, costs, wanted_blocks)
    return Analysis(
        graph,
        largest,
        smallest,
        typical,
        costs,
        tuple(states),
        blocks,
        fitted,
        gains,
        fused.outcomes,
        fused.lengths,
        preamble=fused.preamble,
        uncompared=fused.uncompared,
        chosen=fused.chosen,
    )


def _with_added(fused: Fused, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The inputs' shapes with those of added inputs, which have no range of sizes."""
    added = _added_inputs(fused)
    return {**shapes, **{name: fused.bound.shapes[name] for name in added if name in fused.bound.shapes}}


def _added_inputs(made: Fused | Analysis) -> list[str]:
    """The inputs of the ranks' graphs that the model does not have: lengths, the preamble's outputs, and kept rows."""
    lengths = [name for length in made.lengths for name in length.names]
    computed = [] if made.preamble is None else made.preamble.outputs
    return [*lengths, *computed, *([] if made.chosen is None else [made.chosen.entry.input])]


def _is_small(graph: Graph, bound: BoundShapes) -> bool:
    """Whether the whole model may run to try its sizes."""
    if any(size < 0 for shape in bound.shapes.values() for size in shape):
        return False
    costs = Costs(graph, bound)
    return costs.weight_bytes(graph.nodes) <= LARGEST and sum(map(costs.flops, graph.nodes)) <= MOST_FLOPS


@remembered
def _finer(analysis: Analysis, wanted: int) -> Analysis:
    return replace(analysis, partition=find_blocks(analysis.graph, analysis.costs, wanted))


def with_blocks(analysis: Analysis, wanted: int) -> Analysis:
    """The analysis with at least `wanted` blocks, if the model can be cut that finely."""
    return _finer(analysis, wanted) if wanted > len(analysis.partition.blocks) else analysis
