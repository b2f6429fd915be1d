"""Makes a package's manifest from its plan and the written files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx_ir as ir
import onnxruntime
from msgspec.structs import replace

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.analysis.stages import borrowed_sizes
from splitc.compiler.caches.cache import ROWS
from splitc.compiler.graphs.reads import all_nodes
from splitc.compiler.graphs.walks import reached
from splitc.compiler.modes.rows import row_sources, rows_of_micro_batches
from splitc.compiler.operators.registry import operator_of, quantizes
from splitc.compiler.packaging.unmasked import PLAIN_PREAMBLE, PREAMBLE, have_forms
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.rank_plan import RankPlan
from splitc.compiler.planning.split import RankProgram
from splitc.compiler.request.request import DISK
from splitc.compiler.sizes.made_up import choose_fill, describe_fixed, describe_shape, describe_tensor
from splitc.compiler.sizes.roles import find_roles, planned_roles
from splitc.runtime.engines.kinds import find_kind
from splitc.runtime.package import manifest as m
from splitc.runtime.package.states import Preamble
from splitc.runtime.version import VERSION

_LEAST_PRECISE_FIRST = ("int2", "int4", "int8", "bfloat16", "float16", "float32")


def make_manifest(
    plan: Plan,
    ranks: Sequence[m.Rank],
    files: Sequence[m.File],
    threads: int | None,
    options: m.BuildOptions,
    fills: Mapping[str, m.Fill],
) -> m.Manifest:
    """The manifest of a package with these ranks and files."""
    analysis, batch = plan.analysis, _batch(plan)
    graph = analysis.graph
    built = find_kind(plan.engine).is_built
    slotted = {tensor.name for tensor in m.slot_tensors(analysis.slots)}
    return m.Manifest(
        schema=m.SCHEMA,
        splitc=VERSION,
        source=graph.source,
        split_mode=plan.split_mode,
        engine=plan.engine,
        number_type=number_type(analysis),
        threads=threads,
        inputs=_inputs(plan, fills),
        outputs=_outputs(analysis),
        states=list(analysis.states),
        batch=batch,
        blocks=[block.name for block in analysis.partition.blocks],
        ranks=list(ranks),
        cuts=plan.named_cuts,
        collectives=plan.split.collectives,
        unsplit=[m.UnsplitWeight(*weight) for weight in plan.whole_weights if weight[1] >= m.LISTED],
        files=list(files),
        build=m.Build(options) if built else None,
        fixed=[describe_fixed(fixed) for fixed in graph.fixed],
        optional=[] if built else [describe_tensor(value) for value in graph.optional if value.name not in slotted],
        shared_sizes=_shared_sizes(plan),
        filled_sizes=_filled_sizes(plan),
        unset=_windows(analysis),
        lengths=list(analysis.lengths),
        kept_rows=None if analysis.chosen is None else analysis.chosen.entry,
        preamble=_preamble(plan, have_forms(ranks)),
        replicas=_replicas(plan),
        row_sources=_row_sources(plan, batch),
        slots=list(analysis.slots),
        maps_weights=plan.weights_at == DISK,
        most_rank=plan.most_rank,
        onnxruntime=onnxruntime.__version__,
        merged=[
            m.MergedAdapter(Path(merged.adapter.name).name, merged.strength, len(merged.matches.updates))
            for merged in analysis.merged
        ],
    )


def _windows(analysis: Analysis) -> list[str]:
    """The outputs that are caches of a window. Their operator leaves rows that are not filled as its memory was."""
    operators = [(node, operator_of(node)) for node in analysis.graph.nodes]
    made = {
        node.outputs[place]
        for node, operator in operators
        if operator.state_sizes is not None and ROWS in operator.state_sizes(node)
        for place in operator.states
    }
    return [value.name or "" for value in analysis.graph.graph.outputs if value in made]


def _batch(plan: Plan) -> dict[str, int] | None:
    """The batch's axis of each input and output, including inputs that only the preamble reads."""
    rows = plan.replicas.rows if plan.replicas else rows_of_micro_batches(plan.analysis)
    preamble = plan.analysis.preamble
    return None if rows is None else {**({} if preamble is None else preamble.batch), **rows}


def _row_sources(plan: Plan, batch: Mapping[str, int] | None) -> list[str]:
    """The inputs that have every row of the batch, if others may have one row for all."""
    if plan.replicas is not None:
        return row_sources(plan.analysis, plan.replicas.rows)
    preamble = plan.analysis.preamble
    if preamble is None or batch is None or not preamble.may_broadcast:
        return []
    inputs = (*plan.analysis.graph.graph.inputs, *preamble.model.graph.inputs)
    names = dict.fromkeys(value.name or "" for value in inputs)
    return [name for name in names if name in batch and name not in preamble.may_broadcast]


def _preamble(plan: Plan, has_forms: bool) -> Preamble | None:
    if (preamble := plan.analysis.preamble) is None:
        return None
    inputs = [value.name or "" for value in preamble.model.graph.inputs]
    kept = {value.name for rank in plan.ranks for value in rank.stage.feeds}
    consumed = [name for name in inputs if name not in kept]
    made = Preamble(PREAMBLE, inputs, preamble.outputs, consumed)
    if not has_forms:
        return made
    made = replace(made, masks=dict(preamble.masks), blanks=list(preamble.blanks))
    if (plain := preamble.plain) is None:
        return made
    made = replace(made, plain=PLAIN_PREAMBLE, ones=list(plain.ones), windows=dict(plain.windows))
    if not plain.batched:
        return made
    return replace(made, batched=list(plain.batched), batch=dict(preamble.batch))


def _replicas(plan: Plan) -> list[m.Replica]:
    """The devices of each replica, its share of the rows, and its ranks' bytes; none if there is only one replica."""
    if plan.replicas is None:
        return []
    groups = [[rank for rank in plan.ranks if rank.replica == number] for number in range(plan.groups)]
    return [
        m.Replica(
            [str(rank.device) for rank in group],
            share,
            [rank.memory.activations for rank in group],
            [rank.memory.cache for rank in group],
            [rank.memory.total for rank in group],
        )
        for group, share in zip(groups, plan.replicas.shares, strict=True)
    ]


def _shared_sizes(plan: Plan) -> list[str]:
    """The symbols that stages read off other values than the model does, or that no operator compares any more."""
    sizes = (size for rank in plan.ranks for value in rank.stage.borrowed for size in borrowed_sizes(value))
    read = {size.value for size in sizes if isinstance(size, ir.SymbolicDim) and size.value}
    return sorted(read | plan.analysis.uncompared)


def _filled_sizes(plan: Plan) -> list[str]:
    """The symbols that must not be 0, because ONNX Runtime would end the process."""
    sizes: set[int | ir.SymbolicDim] = set()
    for node in all_nodes(plan.analysis.graph.graph):
        if axes := operator_of(node).crashes_empty:
            shape = node.inputs[0].shape if node.inputs[0] is not None else None
            sizes.update(shape[axis] for axis in axes if shape is not None and len(shape) > axis)
    return sorted({size.value for size in sizes if isinstance(size, ir.SymbolicDim) and size.value})


def rank_entry(
    rank: RankPlan, program: RankProgram, engines: Sequence[m.EngineFile], overrides: Sequence[m.Override]
) -> m.Rank:
    """The manifest's entry for a rank."""
    passed = {*program.inputs, *program.outputs, *program.keeps}  # a rank whose share is too small has no shard of some
    return m.Rank(
        device=str(rank.device),
        blocks=[block.name for block in rank.stage.blocks],
        engines=list(engines),
        program=list(program.steps),
        inputs=list(program.inputs),
        outputs=list(program.outputs),
        parts=[part for part in program.parts if part.name in passed],
        keeps=list(program.keeps),
        weights_bytes=rank.memory.weights,
        activation_bytes=rank.memory.activations,
        cache_bytes=rank.memory.cache,
        total_bytes=rank.memory.total,
        overrides=list(overrides),
        limit_bytes=rank.limit,
        engine_bytes=rank.memory.engines,
        mapped_bytes=rank.memory.in_files,
        passed_bytes=rank.memory.passed,
        adapter_bytes=rank.memory.adapters,
    )


def _inputs(plan: Plan, fills: Mapping[str, m.Fill]) -> list[m.Tensor]:
    graph = plan.analysis.graph
    own = find_roles(graph)
    as_planned = planned_roles(graph, own, plan.analysis.costs.shapes)
    roles, planned = ({value.name or "": role for value, role in known.items()} for known in (own, as_planned))
    if plan.analysis.preamble is not None:
        roles = planned = dict(plan.analysis.preamble.roles)
    return [
        _input(plan, value, roles.get(value.name or ""), planned.get(value.name or ""), fills.get(value.name or ""))
        for value in graph.graph.inputs
        if value.name not in plan.analysis.added
    ]


def _outputs(analysis: Analysis) -> list[m.Tensor]:
    """The outputs in the shapes that requests get which do not choose rows: as the model declares them."""
    declared = {} if analysis.chosen is None else analysis.chosen.declared
    return [
        replace(tensor, shape=describe_shape(declared[tensor.name])) if tensor.name in declared else tensor
        for tensor in map(describe_tensor, analysis.graph.outputs)
    ]


def _input(plan: Plan, value: ir.Value, role: m.Role | None, planned: m.Role | None, asked: m.Fill | None) -> m.Tensor:
    analysis, tensor = plan.analysis, describe_tensor(value)
    low, typical, high = (
        list(shapes[tensor.name]) for shapes in (analysis.smallest, analysis.typical, analysis.shapes)
    )
    built = find_kind(plan.engine).is_built
    least, most = (low, high) if built else (None, None)
    # Shards and built engines have a fixed number of dimensions, even if the model's input has not.
    fixed = tensor.shape is None and (built or plan.split.fixes_ranks)
    shape: m.Shape = [*high] if fixed else tensor.shape
    fill = asked or analysis.fitted.fills.get(tensor.name) or choose_fill(value, planned)
    return m.Tensor(tensor.name, tensor.dtype, shape, typical, fill, least, most, role)


def number_type(analysis: Analysis) -> str:
    """The least precise type of at least a tenth of the weights. It limits how closely outputs can agree.

    A weight that is cast counts in the least precise type on its way, as half precision in models with float32 weights
    that were exported with torch.autocast. Quantized weights count only if activations are quantized too. Otherwise all
    is computed in floats.
    """
    sizes, costs = Counter[str](), analysis.costs
    rounded = any(map(quantizes, analysis.graph.nodes))
    for weight in costs.weights(analysis.graph.nodes):
        types = [value.dtype for value in reached([weight], _passed_on) if value.dtype is not None]
        kinds = {_kind(dtype) for dtype in types if rounded or dtype.is_floating_point()}
        if kinds:
            sizes[next((kind for kind in _LEAST_PRECISE_FIRST if kind in kinds), "other")] += costs.value_bytes(weight)
    held = [kind for kind in _LEAST_PRECISE_FIRST if 10 * sizes[kind] >= sizes.total() > 0]
    return held[0] if held else "float32"


def _kind(dtype: ir.DataType) -> str:
    return f"int{dtype.bitwidth}" if dtype.is_integer() else str(dtype.numpy())


def _passed_on(value: ir.Value) -> list[ir.Value]:
    """What readers make of a value that cast it, dequantize it, or pass it on in another form."""
    readers = [node for node, place in value.uses() if place == 0]
    return [node.outputs[0] for node in readers if operator_of(node).rearranges or operator_of(node).dequantizes]
