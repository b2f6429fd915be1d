"""What ONNX Runtime's optimizer makes of a graph's nodes, as far as the memory of a run goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.execution.gelus import biased_gelus, find_gelus
from splitc.compiler.execution.liveness import Reads, Size, is_view
from splitc.compiler.execution.normed_sums import Alike, find_normed_sums
from splitc.compiler.execution.order import ends_gelu, order_after_passes
from splitc.compiler.execution.products import biased_products, scaled_products
from splitc.compiler.execution.reshapes import without_own_sizes
from splitc.compiler.frontend.reads import holds_graphs
from splitc.compiler.operators.registry import operator_of


@dataclass(frozen=True)
class Optimized:
    """The nodes in the order in which they run, and what each reads.

    `places` are the values that lie in the memory of another one, which may be such a value too. `copying` are Gelus
    that copy what they read.
    """

    order: Sequence[ir.Node]
    reads: Reads
    places: Mapping[ir.Value, ir.Value]
    copying: Container[ir.Node]

    def root(self, value: ir.Value) -> ir.Value:
        """The value whose memory a value lies in: its own, if nothing else."""
        return _root(self.places, value)


def optimize(
    nodes: Sequence[ir.Node],
    reads: Reads,
    size: Size,
    kept: Collection[ir.Value],
    is_summed: Callable[[ir.Node], bool],
    alike: Alike,
    overwrites: bool,
) -> Optimized:
    """What ONNX Runtime runs of these nodes. A product that `is_summed` over ranks is no part of another node.

    A view is in the place of its source. If the engine `overwrites`, so is the result of a node that may do so, if that
    is the last one to read what it overwrites, and both are `alike`. What is `kept` leaves the engine.
    """
    nodes, reads, gelus = find_gelus(*without_own_sizes(*_merged(nodes, reads), kept))
    nodes, reads, norms = find_normed_sums(nodes, reads, kept, alike)
    biased = biased_products(nodes, reads)
    scaled, products = scaled_products(nodes, reads, kept, lambda node: node in biased.values() or is_summed(node))
    by_tanh = {node for node in gelus if node.op_type == "Mul" and not ends_gelu(node, {})}
    order = order_after_passes(nodes, reads, biased, norms, by_tanh, products)
    made = {value for node in order for value in node.outputs}
    places = {node.outputs[0]: first for node in order if (first := _viewed(node, size, made)) is not None}
    # What a product would make without its bias is never there. What is summed over ranks first gets no bias before.
    alone = [product for product in biased.values() if not is_summed(product)]
    places.update((node.outputs[0], first) for node in alone if (first := node.inputs[0]) is not None)
    places.update(scaled)
    copying = {
        node: data
        for node, data in biased_gelus(gelus, nodes, reads, biased).items()
        if (maker := data.producer()) is None
        or not is_summed(maker)
        or alike(data, data)  # else its width is not known
    }
    places.update((gelus[node], data) for node, data in copying.items())
    if overwrites:
        may = [node for node in order if not is_summed(node) and _may_overwrite(node, alike)]
        _overwrite(order, reads, places, made - {_root(places, value) for value in kept}, may)
    return Optimized(order, reads, places, copying)


def _merged(nodes: Sequence[ir.Node], reads: Reads) -> tuple[list[ir.Node], Reads]:
    """The nodes without those that compute what one before them does, and what each reads then.

    ONNX Runtime merges them (core/optimizer/common_subexpression_elimination.cc).
    """
    first: dict[Hashable, ir.Node] = {}
    same = dict[ir.Value, ir.Value]()
    kept = []
    for node in nodes:
        inputs = tuple(value and same.get(value, value) for value in node.inputs)
        how = frozenset((name, str(attribute.value)) for name, attribute in node.attributes.items())
        other = first.setdefault((node.domain, node.op_type, inputs, how), node)
        if other is node or operator_of(node).random or holds_graphs(node):
            kept.append(node)
        else:
            same.update(zip(node.outputs, other.outputs, strict=False))
    return kept, lambda node: [same.get(value, value) for value in reads(node)]


def _viewed(node: ir.Node, size: Size, made: Container[ir.Value]) -> ir.Value | None:
    """The value of which the node's result is a view; None if the result has memory of its own.

    It may be one that is fed, and takes none here. A Cast to the type that there is is taken out (CastElimination,
    core/optimizer/cast_elimination.cc).
    """
    first = node.inputs[0] if node.inputs else None
    keeps_type = node.op_type == "Cast" and first is not None and first.dtype == node.outputs[0].dtype
    is_fed = operator_of(node).is_view and first not in made
    return first if keeps_type or is_fed or is_view(node, size) else None


def _may_overwrite(node: ir.Node, alike: Alike) -> bool:
    """Whether the node's kernel may write over its first input; see `Operator.overwrites`.

    In half precision kernels for CPUs have casts between the nodes, of which no file says the shapes.
    """
    one, other = node.inputs[0] if node.inputs else None, node.outputs[0]
    if one is None or not operator_of(node).overwrites:
        return False
    types = {one.dtype, other.dtype}
    if types & {None, ir.DataType.UNDEFINED, ir.DataType.STRING, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}:
        return False
    return len({dtype.bitwidth for dtype in types if dtype is not None}) == 1 and alike(one, other)


def _overwrite(
    order: Sequence[ir.Node],
    reads: Reads,
    places: dict[ir.Value, ir.Value],
    may_lie: Container[ir.Value],
    may: Collection[ir.Node],
) -> None:
    """Put what some nodes make in the place of what they read last, in place, if both `may_lie` in one."""
    left = Counter(_root(places, value) for node in order for value in reads(node))
    for node in order:
        made = node.outputs[0]
        if node in may and made in may_lie and made not in places and node.inputs[0] is not None:
            own = _root(places, node.inputs[0])
            if own in may_lie and left[own] == 1:
                places[made] = own
                left[own] += left[made]
        left.subtract(_root(places, value) for value in reads(node))


def _root(places: Mapping[ir.Value, ir.Value], value: ir.Value) -> ir.Value:
    while value in places:
        value = places[value]
    return value
