"""A rank's graph with its communication nodes, which tokens keep in order, as in the engine's file.

In row mode these are chained sends and receives, and the main rank joins columns (row_graphs.py in compiler/lowering).
In each round the main rank sends the products' inputs, multiplies, and then receives other ranks' columns in a fixed
order, so all columns of a round are there before any is joined. Any other rank receives, multiplies and sends. In
tensor mode they are all-reduces.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import chain

import onnx_ir as ir

from splitc.compiler.execution.liveness import Alike, Reads, Size
from splitc.compiler.operators.operator import Shapes

DOMAIN = "splitc"
# A token has one byte.
TOKEN = 1
# The shapes of a node's inputs and outputs.
NodeShapes = Callable[[ir.Node], tuple[Shapes, Shapes]]


@dataclass(frozen=True)
class Round:
    """The products of a round, with each rank's share of their columns, as the rank of this `number` runs it.

    The main rank, number 0, sends inputs to each other rank. Others receive only those they need.
    """

    products: Mapping[ir.Node, Mapping[int, float]]
    sent: Sequence[Sequence[ir.Value]] = ()
    takes: Sequence[ir.Value] = ()
    number: int = 0


@dataclass(frozen=True)
class EngineGraph:
    """An engine's nodes in the file's order, the values that each reads, and the bytes of the values they make.

    - `kept`: values that leave the engine.
    - `summed`: values that are all-reduced; this rank makes its part of each.
    - `rounds`: those of a rank in row mode.
    - `exchanged`: the bytes of a value on its way between ranks, where engines hold half precision as single.
    - `shapes`: given if images may be in the blocked layout.
    - `same`: values that are replaced by others.
    """

    nodes: Sequence[ir.Node]
    reads: Reads
    size: Size
    kept: AbstractSet[ir.Value]
    alike: Alike = lambda one, other: False
    summed: Mapping[ir.Value, ir.Value] = field(default_factory=dict)
    rounds: Sequence[Round] = ()
    exchanged: Size | None = None
    shapes: NodeShapes | None = None
    same: Mapping[ir.Value, ir.Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Exchange:
    """Nodes in the file's order, communication included, and the values that each reads.

    - `came`: replacements for values of the model: joined columns, received values, and sums.
    - `bytes`: the sizes of all values that communication nodes make.
    - `aliases`: values in the memory of others: what was sent, and sums that overwrite the rank's part.
    """

    nodes: Sequence[ir.Node]
    reads: Reads
    came: Mapping[ir.Value, ir.Value]
    bytes: Mapping[ir.Value, int]
    aliases: Mapping[ir.Value, ir.Value]


def with_exchange(graph: EngineGraph) -> Exchange:
    """The graph with the rank's communication nodes."""
    return _with_rounds(graph) if graph.rounds else _with_sums(graph)


def _with_sums(graph: EngineGraph) -> Exchange:
    """The graph of a rank that all-reduces the `summed` values.

    The rank's part is the value that its own node makes. Where that node would only pass on its input, the part is the
    input. A sum overwrites a part that was made for it, if the file says how large it is.
    """
    summed = graph.summed
    if not summed:
        return Exchange(graph.nodes, graph.reads, {}, {}, {})
    ordered, own = list[ir.Node](), dict[ir.Node, list[ir.Value]]()
    came, bytes_, aliases = dict[ir.Value, ir.Value](), dict[ir.Value, int](), dict[ir.Value, ir.Value]()
    token: list[ir.Value] = []
    for node in graph.nodes:
        sums = [value for value in node.outputs if value in summed]
        if all(summed[value] is value for value in sums):
            ordered.append(node)
        for value in sums:
            part = summed[value]
            reduction = ir.Node(DOMAIN, "AllReduce", (), [ir.AttrInt64("number", len(own))], num_outputs=2)
            whole = reduction.outputs[0]
            ordered.append(reduction)
            own[reduction] = [came.get(part, part), *token]
            token = [reduction.outputs[1]]
            came[value], bytes_[whole], bytes_[token[0]] = whole, graph.size(value), TOKEN
            if part is value and graph.alike(value, value):
                aliases[whole] = value

    def read(node: ir.Node) -> list[ir.Value]:
        return own[node] if node in own else [came.get(value, value) for value in graph.reads(node)]

    return Exchange(ordered, read, came, bytes_, aliases)


def _with_rounds(graph: EngineGraph) -> Exchange:
    """The graph of a rank that sends and receives in its rounds."""
    builder = _Builder(graph)
    for one in graph.rounds:
        (builder.help if one.number else builder.lead)(one)
    joins, products = builder.joins, {node for one in graph.rounds for node in one.products}
    others = [joins.get(node, node) for node in graph.nodes if node in joins or node not in products]
    nodes = _sorted(others + builder.added, builder.read)
    return Exchange(nodes, builder.read, builder.came, builder.bytes, builder.aliases)


class _Builder:
    """Adds rounds to a graph. `own` are the inputs of added nodes and products; other nodes read as in the file."""

    def __init__(self, graph: EngineGraph) -> None:
        self._reads, self._size, self._exchanged = graph.reads, graph.size, graph.exchanged or graph.size
        self._own: dict[ir.Node, list[ir.Value]] = {}
        self._token: list[ir.Value] = []
        self.added: list[ir.Node] = []
        self.joins: dict[ir.Node, ir.Node] = {}
        self.came: dict[ir.Value, ir.Value] = {}
        self.bytes: dict[ir.Value, int] = {}
        self.aliases: dict[ir.Value, ir.Value] = {}

    def read(self, node: ir.Node) -> list[ir.Value]:
        """The values that a node reads."""
        own = self._own.get(node)
        return own if own is not None else [self.came.get(value, value) for value in self._reads(node)]

    def lead(self, one: Round) -> None:
        """Add a round of the main rank: send, multiply, receive, join."""
        sent: dict[ir.Value, ir.Value] = {}
        for value in chain.from_iterable(one.sent):
            now = sent.get(value, self.came.get(value, value))
            sent[value] = self._node("Send", [now], [0, TOKEN])[0]
            self.aliases[sent[value]] = now
        self._multiply(one, sent)
        parts = {node: [node.outputs[0]] if 0 in shares else [] for node, shares in one.products.items()}
        for rank in sorted({rank for shares in one.products.values() for rank in shares} - {0}):
            for node, shares in one.products.items():
                if rank in shares:
                    parts[node].append(self._receive(node.outputs[0], shares[rank]))
        for node, columns in parts.items():
            join, whole = self._new("Concat", 1), node.outputs[0]
            self._own[join], self.joins[node] = columns, join
            self.came[whole], self.bytes[join.outputs[0]] = join.outputs[0], self._size(whole)

    def help(self, one: Round) -> None:
        """Add a round of any other rank: receive, multiply, send."""
        self.came.update((value, self._receive(value, 1.0)) for value in one.takes)
        for node in self._multiply(one, {}):
            share, columns = one.products[node][one.number], node.outputs[0]
            held, sent = (int(size(columns) * share) for size in (self._size, self._exchanged))
            self._node("Send", [self._cast(columns, held, sent)], [TOKEN])

    def _multiply(self, one: Round, sent: Mapping[ir.Value, ir.Value]) -> list[ir.Node]:
        """Add the products that the rank has columns of. All later nodes wait for them."""
        own = [node for node, shares in one.products.items() if one.number in shares]
        for node, shares in one.products.items():
            self._own[node] = [sent.get(value, self.came.get(value, value)) for value in self._reads(node)]
            self.bytes[node.outputs[0]] = int(self._size(node.outputs[0]) * shares.get(one.number, 0.0))
        self.added += own
        if own:
            self._node("After", [node.outputs[0] for node in own], [TOKEN])
        return own

    def _receive(self, value: ir.Value, share: float) -> ir.Value:
        """Add the node that receives a share of a value. Returns the share as the engine holds it."""
        came, held = (int(size(value) * share) for size in (self._exchanged, self._size))
        return self._cast(self._node("Receive", [], [came, TOKEN])[0], came, held)

    def _cast(self, value: ir.Value, size: int, then: int) -> ir.Value:
        """A value of `size` bytes, cast if it has `then` bytes afterwards."""
        if size == then:
            return value
        cast = self._new("Cast", 1)
        self._own[cast], self.bytes[cast.outputs[0]] = [value], then
        self.added.append(cast)
        return cast.outputs[0]

    def _node(self, name: str, reads: Sequence[ir.Value], sizes: Sequence[int]) -> Sequence[ir.Value]:
        """Add a chained node. Returns its results, of these sizes; the last one is its token."""
        node = self._new(name, len(sizes))
        self._own[node] = [*reads, *self._token]
        self.added.append(node)
        self.bytes.update(zip(node.outputs, sizes, strict=True))
        self._token = [node.outputs[-1]]
        return node.outputs

    def _new(self, name: str, outputs: int) -> ir.Node:
        return ir.Node(DOMAIN, name, (), [ir.AttrInt64("number", len(self._own))], num_outputs=outputs)


def _sorted(nodes: Sequence[ir.Node], read: Callable[[ir.Node], Sequence[ir.Value]]) -> list[ir.Node]:
    """The nodes in topological order, each as late as its readers allow, as `ir.Graph.sort` has them."""
    makers = {value: number for number, node in enumerate(nodes) for value in node.outputs}
    above = [[makers[value] for value in read(node) if value in makers] for node in nodes]
    readers = [0] * len(nodes)
    for made in above:
        for maker in made:
            readers[maker] += 1
    ready = [-number for number, count in enumerate(readers) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        number = -heapq.heappop(ready)
        order.append(nodes[number])
        for maker in above[number]:
            readers[maker] -= 1
            if not readers[maker]:
                heapq.heappush(ready, -maker)
    return order[::-1]
