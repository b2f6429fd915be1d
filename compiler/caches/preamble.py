"""Cuts off the preamble: nodes that depend on the number of cached tokens, which the session computes on the CPU.

Exporters compute masks, positions and lengths from inputs, and from sizes that grow with each token. Without these
nodes, consecutive requests have the same sizes, so that GPUs replay a captured CUDA graph.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import onnx_ir as ir

from splitc.compiler.caches.lengths import Filled, Lengths
from splitc.compiler.caches.masks import find_blanks, find_masks
from splitc.compiler.caches.plain_requests import Plain, find_plain, is_batched
from splitc.compiler.graphs.matching import is_onnx
from splitc.compiler.graphs.node_key import node_key, tensor_key
from splitc.compiler.graphs.origins import hand_over
from splitc.compiler.graphs.reads import holds_graphs, node_reads
from splitc.compiler.graphs.unused import remove_unused, remove_unused_inputs
from splitc.compiler.graphs.walks import ancestors, producers
from splitc.compiler.nodes import inputs_of, known_tensor, known_weight
from splitc.compiler.operators.registry import draws, operator_of
from splitc.compiler.patterns.context import Context
from splitc.compiler.patterns.errors import NotFusedError
from splitc.compiler.patterns.sizes import Sizes, size_readers
from splitc.compiler.states.own_sizes import mark_omittable
from splitc.runtime.package.manifest import Role

# The most bytes of a constant in the preamble. A choice: tables of positions are larger, and are read on the device.
LARGEST = 1 << 16


@dataclass(frozen=True)
class Preamble:
    """The preamble as a model. Its inputs are some of the model's and the added lengths; its outputs are ranks' inputs.

    - `roles`: the roles of the model's inputs by name, some of which the ranks' graphs no longer have.
    - `batch`: by name, the axes of inputs that are the batch. `may_broadcast`: those that may have one row for all.
    - `masks`: outputs that a request may omit (masks.py). `blanks` are omitted with them: the entirely masked rows.
    - `plain`: the requests for which neither has to be computed (plain_requests.py); None if there are none.
    """

    model: ir.Model
    roles: Mapping[str, Role]
    batch: Mapping[str, int]
    masks: Mapping[str, str]
    blanks: Sequence[str] = ()
    plain: Plain | None = None
    may_broadcast: Sequence[str] = ()

    @property
    def outputs(self) -> list[str]:
        """The names of its outputs."""
        return [value.name or "" for value in self.model.graph.outputs]


def cut_preamble(context: Context, lengths: Lengths, roles: Mapping[str, Role]) -> Preamble:
    """Cut off the preamble. Its results become inputs of the remaining graph, which is changed in place.

    Raises NotFusedError if the remaining graph would still have sizes that grow with each token. The graph then stays
    whole, though some sizes are read off other values and equal nodes are merged.
    """
    model, sizes, filled = context.graph.model, context.sizes, lengths.filled
    graph = model.graph
    inputs = [value for value in graph.inputs if value.name not in context.pasts]
    early = _read_sizes_off_inputs(graph, inputs, lengths)
    growing = {size for one in filled for size in (one.past.size, one.all.size)}
    grown = {one.input for one in filled}
    grown |= {v for v in early if v.is_graph_input() and not growing.isdisjoint(sizes.of(v) or ())}
    shown = {name for name, role in roles.items() if role.kind == "mask"}
    padding = shown | {name for name, role in roles.items() if role.kind == "padding"}
    lone = _lone_masks(inputs, padding)
    _read_sizes_beside(lone, lengths, sizes)
    try:
        made = _outputs(graph, {*grown, *lone}, early, sizes)
    except NotFusedError:
        made = _outputs(graph, grown, early, sizes)
    cut = _copy(model, made)
    batch, may_broadcast = _find_batch(cut.graph.inputs, filled, sizes, padding)
    masks = find_masks(made, filled, sizes)
    blanks = find_blanks(made, masks)
    plain = find_plain(cut.graph, masks, blanks, filled, sizes, shown)
    for value in made:
        new = _replace(graph, value)
        if new.name in masks or new.name in blanks:
            mark_omittable(new)
    return Preamble(cut, roles, batch, masks, blanks, plain, may_broadcast)


def without_outputs(model: ir.Model, names: Collection[str]) -> ir.Model:
    """A copy of the preamble without some outputs, and without the inputs that only these need."""
    graph = model.graph.clone()
    for value in [value for value in graph.outputs if value.name in names]:
        graph.outputs.remove(value)
    remove_unused(graph)
    remove_unused_inputs(graph)
    return ir.Model(graph, ir_version=model.ir_version)


def _find_batch(
    inputs: Sequence[ir.Value], filled: Sequence[Filled], sizes: Sizes, masks: Collection[str]
) -> tuple[dict[str, int], list[str]]:
    """By name, the axes of inputs with the size of the caches' batch; and which of them may have one row for all.

    The batch of a mask may have a symbol of its own: torch's newer exporter does not relate what is broadcast.
    """
    batches = {axes[0].size for one in filled if (axes := sizes.axes(one.lasts)) and axes[0].fixed is None}
    known = {
        value.name or "": place
        for value in inputs
        for place, size in enumerate(sizes.of(value) or ())
        if size in batches
    }
    others = [
        value.name or ""
        for value in inputs
        if value.name in masks and value.name not in known and len(batches) == 1
        if is_batched(sizes.axes(value), *batches)
    ]
    return {**known, **dict.fromkeys(others, 0)}, others


def _read_sizes_off_inputs(graph: ir.Graph, inputs: Sequence[ir.Value], lengths: Lengths) -> set[ir.Value]:
    """Read sizes off inputs where the graph reads them off hidden states, as of the batch. Returns the early values."""
    early = _find_early(graph, inputs)
    for node in list(graph):
        if is_onnx(node, "Shape") and node.inputs[0] not in early:
            lengths.writer(node, *lengths.filled).read_elsewhere(node, "sizes")
    return _find_early(graph, inputs)


def _lone_masks(inputs: Sequence[ir.Value], masks: Collection[str]) -> dict[ir.Value, frozenset[str]]:
    """The masks with sizes that no other kind of input has, with the symbols of these.

    Such a size may be that of all tokens, though the planned sizes of an empty cache do not show it.
    """
    by_value = {value: _symbols(value) for value in inputs}
    others = frozenset[str]().union(*(symbols for value, symbols in by_value.items() if value.name not in masks))
    return {value: own for value, symbols in by_value.items() if value.name in masks and (own := symbols - others)}


def _symbols(value: ir.Value) -> frozenset[str]:
    return frozenset(size.value for size in value.shape or () if isinstance(size, ir.SymbolicDim) and size.value)


def _read_sizes_beside(masks: Mapping[ir.Value, frozenset[str]], lengths: Lengths, sizes: Sizes) -> None:
    """Read sizes of masks, other than these symbols, off other inputs."""
    for mask, own in masks.items():
        for node in size_readers(mask):
            if own.isdisjoint(axis.name for axis in sizes.read_by(node) or ()):
                writer = lengths.writer(node)
                others = tuple(value for value in writer.sources if value is not mask)
                replace(writer, sources=others).read_elsewhere(node, "sizes")


def _outputs(graph: ir.Graph, begin: Collection[ir.Value], early: Collection[ir.Value], sizes: Sizes) -> list[ir.Value]:
    """The preamble's outputs: of these values, and the early ones computed from them, those that the rest reads.

    They are in the graph's order. Raises NotFusedError if one has a size that grows with each token.
    """
    following = set(begin)
    for node in graph:
        if not following.isdisjoint(node.inputs):
            following.update(value for value in node.outputs if value in early)
    _merge_equal(graph, following, early)
    kept = {axis.size for value in graph.inputs if value not in following for axis in sizes.axes(value) or ()}
    ordered = chain(graph.inputs, (value for node in graph for value in node.outputs))
    made = [value for value in ordered if value in following and _is_read_later(value, early)]
    for value in made:
        axes = sizes.axes(value)
        if value.is_graph_input() or value.is_graph_output() or axes is None:
            raise NotFusedError(f"'{value.name}' grows with each token, and is read by more than masks and positions")
        if any(axis.fixed is None and axis.size not in kept for axis in axes):
            raise NotFusedError(f"'{value.name}' grows with each token, and is not the mask of an attention")
    return made


def _find_early(graph: ir.Graph, inputs: Sequence[ir.Value]) -> set[ir.Value]:
    """The early values: computed from these inputs and small constants by nodes that are cheap on the CPU."""
    early = set(inputs)
    for node in graph:
        read = inputs_of(node)
        light = all(value in early or _is_small(value) for value in read)
        if light and not operator_of(node).is_product and not draws(node) and not holds_graphs(node):
            early.update(node.outputs)
    return early


def _merge_equal(graph: ir.Graph, among: Collection[ir.Value], early: Collection[ir.Value]) -> None:
    """Merge nodes that compute equal values, as in models whose layers compute the same mask each.

    Equal nodes may have inputs that equal nodes compute. Nodes with outputs not `among` these values stay.
    """
    kept: dict[Hashable, ir.Node] = {}
    same: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        if not all(value in early for value in node.outputs):
            continue
        inputs = [value if value is None else same.get(value, value) for value in node.inputs]
        one = kept.setdefault((node_key(node), *map(_content, inputs)), node)
        same.update(zip(node.outputs, one.outputs, strict=True))
        if one is not node and all(value in among for value in node.outputs):
            for old, new in zip(node.outputs, one.outputs, strict=True):
                old.replace_all_uses_with(new)


def _content(value: ir.Value | None) -> Hashable:
    """The key of an input by which nodes are compared: a constant's numbers, or a computed value itself."""
    tensor = known_tensor(value)
    return value if tensor is None else tensor_key(tensor)


def _is_small(value: ir.Value) -> bool:
    tensor = known_weight(value)
    return tensor is not None and tensor.nbytes <= LARGEST


def _is_read_later(value: ir.Value, early: Collection[ir.Value]) -> bool:
    """Whether a value is an output, or has a reader that is not early."""
    return value.is_graph_output() or any(
        early_output not in early for node, _ in value.uses() for early_output in node.outputs
    )


def _copy(model: ir.Model, made: Sequence[ir.Value]) -> ir.Model:
    """The nodes that make these values, as a model of its own."""
    graph = model.graph
    wanted = ancestors(producers(made), node_reads)
    nodes = [node for node in graph if node in wanted]
    read = {value for node in nodes for value in node_reads(node)}
    view = ir.GraphView(
        [value for value in graph.inputs if value in read],
        made,
        nodes=nodes,
        initializers=tuple(value for value in graph.initializers.values() if value in read),
        opset_imports=graph.opset_imports,
        name=f"{graph.name}/preamble",
    )
    return ir.Model(view.clone(), ir_version=model.ir_version)


def _replace(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """Replace a value by a new input, which is returned."""
    new = ir.Value(type=value.type, shape=value.shape)
    value.replace_all_uses_with(new)
    hand_over(value, new, "before")
    graph.inputs.append(new)
    return new
