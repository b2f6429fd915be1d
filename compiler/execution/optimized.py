"""The nodes that ONNX Runtime's optimizer makes of a graph's, as far as memory depends on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from splitc.compiler.execution.blocks import DOMAIN as BLOCKS
from splitc.compiler.execution.blocks import find_blocks
from splitc.compiler.execution.convolutions import resolve
from splitc.compiler.execution.exchange import DOMAIN as EXCHANGE
from splitc.compiler.execution.exchange import EngineGraph
from splitc.compiler.execution.fused import Fused, fuse
from splitc.compiler.execution.liveness import Alike, Nodes, Reads, Size
from splitc.compiler.execution.patterns import biased_gelus
from splitc.compiler.operators.registry import operator_of


@dataclass(frozen=True)
class Optimized:
    """The nodes in execution order, and the values that each reads.

    - `places`: values in the memory of another value, which may itself be in a third one's.
    - `copying`: fused Gelus that copy their input.
    - `kept`: values that leave the engine.
    - `in_blocks`: nodes that read images in the blocked layout.
    - `integers`: nodes that compute in integers, with the node of the file that each replaces.
    """

    order: Sequence[ir.Node]
    reads: Reads
    size: Size
    places: Mapping[ir.Value, ir.Value]
    copying: Container[ir.Node]
    kept: Collection[ir.Value]
    in_blocks: Container[ir.Node] = ()
    integers: Mapping[ir.Node, ir.Node] = field(default_factory=dict)

    def root(self, value: ir.Value) -> ir.Value:
        """The value whose memory holds a value: itself, if it has memory of its own."""
        return resolve(self.places, value)

    def is_as_in_file(self, node: ir.Node) -> bool:
        """Whether a node's kernel allocates what its operator says: it neither reorders nor communicates."""
        return node.domain not in (EXCHANGE, BLOCKS) and node not in self.in_blocks


def optimize(graph: EngineGraph, overwrites: bool) -> Optimized:
    """The nodes that ONNX Runtime runs for a graph, and which values share memory.

    A view shares its source's memory. If the engine `overwrites`, a node that can run in place does so when it is the
    last reader of its input and both have the same size.
    """
    fused, alike = fuse(graph, overwrites), graph.alike
    blocks = find_blocks(graph, fused)
    order, reads, over, same = blocks.order, blocks.reads, dict(blocks.sums), {**fused.same, **blocks.parts}
    ends = {blocks.plain.get(value, value) for value in fused.ends(graph.kept)}
    own = {**fused.bytes, **blocks.bytes}

    def size(value: ir.Value) -> int:
        return own[value] if value in own else graph.size(value)

    def first(node: ir.Node) -> ir.Value | None:
        """What a node reads first."""
        value = node.inputs[0] if node.inputs else None
        return value and resolve(same, blocks.read(node, resolve(same, value)))

    made = {value for node in order for value in node.outputs}
    places = {node.outputs[0]: value for node in order if (value := _viewed(node, first(node), size, made)) is not None}
    # What a product would make without its bias is never there.
    products = fused.biased.values()
    places.update((product.outputs[0], value) for product in products if (value := first(product)) is not None)
    places.update((value, resolve(same, data)) for value, data in fused.scaled.items())
    places.update(fused.exchange.aliases)
    copying = _copying(fused, reads, alike)
    places.update((fused.gelus[node], resolve(same, data)) for node, data in copying.items())
    if overwrites:
        may = [node for node in order if node.outputs[0] not in fused.exchange.came and _may_overwrite(node, alike)]
        over.update((node, value) for node in may if (value := first(node)) is not None)
        _overwrite(order, reads, places, made - {resolve(places, value) for value in ends}, over)
    return Optimized(order, reads, size, places, copying, ends, blocks.taken, fused.integers)


def _copying(fused: Fused, reads: Reads, alike: Alike) -> dict[ir.Node, ir.Value]:
    """The Gelus that add a bias first, with its other summand. If that was exchanged, its width must be known."""
    biased = biased_gelus(fused.gelus, Nodes(fused.nodes.order, reads), fused.biased)
    return {node: data for node, data in biased.items() if data not in fused.exchange.came or alike(data, data)}


def _viewed(node: ir.Node, first: ir.Value | None, size: Size, made: Container[ir.Value]) -> ir.Value | None:
    """The input `first`, if the node's result is a view of it; None if the result has memory of its own.

    It may be a feed, which takes no memory here. A Cast to the same type is removed (CastElimination,
    core/optimizer/cast_elimination.cc).
    """
    if first is None:
        return None
    keeps_type = node.op_type == "Cast" and node.inputs[0] is not None and node.inputs[0].dtype == node.outputs[0].dtype
    is_same = operator_of(node).is_view and (first not in made or size(first) == size(node.outputs[0]))
    return first if keeps_type or is_same else None


def _may_overwrite(node: ir.Node, alike: Alike) -> bool:
    """Whether the node's kernel can run in place on its first input; see `Operator.overwrites`.

    In half precision, kernels for CPUs have casts between nodes. Their shapes are in no file.
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
    over: Mapping[ir.Node, ir.Value],
) -> None:
    """Put a node's result in the memory of its input in `over`, if it is the last reader and both `may_lie` there."""
    left = Counter(resolve(places, value) for node in order for value in reads(node))
    for node in order:
        made = node.outputs[0]
        if node in over and made in may_lie and made not in places:
            own = resolve(places, over[node])
            if own in may_lie and left[own] == 1:
                places[made] = own
                left[own] += left[made]
        left.subtract(resolve(places, value) for value in reads(node))
