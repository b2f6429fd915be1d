"""Row mode's main rank as a graph: what it sends and receives is chained, and columns are joined.

It is the graph of row_graphs.py in compiler/lowering: in each round it sends what products take, multiplies, and
receives other ranks' columns, in one order. So all columns of a round are there before a value is made of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import onnx_ir as ir

from splitc.compiler.execution.liveness import Reads, Size

DOMAIN = "splitc"
# A token has one byte.
TOKEN = 1


@dataclass(frozen=True)
class Round:
    """The products of a round, each with the shares of its columns by rank, and what is sent to each other rank."""

    products: Mapping[ir.Node, Mapping[int, float]]
    sent: Sequence[Sequence[ir.Value]]


@dataclass(frozen=True)
class Exchange:
    """Nodes with those that send, receive and join, in the order of a file, and what each reads.

    `joined` are the values made of columns, by the product whose results they are. `bytes` are those of columns, tokens
    and joined values. `aliases` are what was sent, by the name that products read it by.
    """

    nodes: Sequence[ir.Node]
    reads: Reads
    joined: Mapping[ir.Value, ir.Value]
    bytes: Mapping[ir.Value, int]
    aliases: Mapping[ir.Value, ir.Value]


def with_rounds(nodes: Sequence[ir.Node], reads: Reads, size: Size, rounds: Sequence[Round]) -> Exchange:
    """The graph of a rank that sends and receives in these rounds; of one without any, what there was."""
    if not rounds:
        return Exchange(nodes, reads, {}, {}, {})
    builder = _Builder(reads, size)
    for one in rounds:
        builder.add(one)
    ordered = [builder.joins.get(node, node) for node in nodes] + builder.added
    return Exchange(_sorted(ordered, builder.read), builder.read, builder.joined, builder.bytes, builder.aliases)


class _Builder:
    """Adds rounds. What a node reads that is added, or multiplies, is its `own`; others read what the file says."""

    def __init__(self, reads: Reads, size: Size) -> None:
        self._reads, self._size = reads, size
        self._own: dict[ir.Node, list[ir.Value]] = {}
        self._token: list[ir.Value] = []
        self.added: list[ir.Node] = []
        self.joins: dict[ir.Node, ir.Node] = {}
        self.joined: dict[ir.Value, ir.Value] = {}
        self.bytes: dict[ir.Value, int] = {}
        self.aliases: dict[ir.Value, ir.Value] = {}

    def read(self, node: ir.Node) -> list[ir.Value]:
        """What a node reads."""
        own = self._own.get(node)
        return own if own is not None else [self.joined.get(value, value) for value in self._reads(node)]

    def add(self, one: Round) -> None:
        """Add what sends, multiplies, receives and joins in a round."""
        sent: dict[ir.Value, ir.Value] = {}
        for value in chain.from_iterable(one.sent):
            now = sent.get(value, self.joined.get(value, value))
            sent[value] = self._node("Send", [now], [0, TOKEN])[0]
            self.aliases[sent[value]] = now
        own = [node for node, shares in one.products.items() if 0 in shares]
        for node in own:
            self._own[node] = [sent.get(value, self.joined.get(value, value)) for value in self._reads(node)]
        self.added += own
        if own:
            self._node("After", [node.outputs[0] for node in own], [TOKEN])
        parts = {node: [node.outputs[0]] if 0 in shares else [] for node, shares in one.products.items()}
        for rank in sorted({rank for shares in one.products.values() for rank in shares} - {0}):
            for node, shares in one.products.items():
                if rank in shares:
                    columns = int(self._size(node.outputs[0]) * shares[rank])
                    parts[node].append(self._node("Receive", [], [columns, TOKEN])[0])
        for node, shares in one.products.items():
            join, whole = self._new("Concat", 1), self._size(node.outputs[0])
            self._own[join], self.joins[node] = parts[node], join
            self.joined[node.outputs[0]] = join.outputs[0]
            self.bytes[join.outputs[0]], self.bytes[node.outputs[0]] = whole, int(whole * shares.get(0, 0.0))

    def _node(self, name: str, reads: Sequence[ir.Value], sizes: Sequence[int]) -> Sequence[ir.Value]:
        """Add a chained node. Returns what it makes, of these sizes: last its token."""
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
