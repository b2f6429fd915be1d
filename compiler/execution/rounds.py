"""A rank of row mode as a graph: what it sends and receives is chained, and the main rank joins columns.

It is the graph of row_graphs.py in compiler/lowering. In each round the main rank sends what products take, multiplies,
and receives other ranks' columns, in one order. So all columns of a round are there before a value is made of them.
Any other rank receives, multiplies and sends.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import onnx_ir as ir

from splitc.compiler.execution.exchange import DOMAIN, TOKEN, Exchange
from splitc.compiler.execution.liveness import Reads, Size


@dataclass(frozen=True)
class Round:
    """The products of a round, each with the shares of its columns by rank, as the rank of this `number` runs it.

    The main rank, number 0, sends values to each other rank. Any other one takes some.
    """

    products: Mapping[ir.Node, Mapping[int, float]]
    sent: Sequence[Sequence[ir.Value]] = ()
    takes: Sequence[ir.Value] = ()
    number: int = 0


def with_rounds(
    nodes: Sequence[ir.Node], reads: Reads, size: Size, rounds: Sequence[Round], exchanged: Size
) -> Exchange:
    """The graph of a rank that sends and receives in these rounds.

    Values have a `size` in an engine, and one when they are `exchanged`: on CPUs halves are singles in between.
    """
    builder = _Builder(reads, size, exchanged)
    for one in rounds:
        (builder.help if one.number else builder.lead)(one)
    products = {node for one in rounds for node in one.products}
    others = [builder.joins.get(node, node) for node in nodes if node in builder.joins or node not in products]
    return Exchange(
        _sorted(others + builder.added, builder.read), builder.read, builder.came, builder.bytes, builder.aliases
    )


class _Builder:
    """Adds rounds. What a node reads that is added, or multiplies, is its `own`; others read what the file says."""

    def __init__(self, reads: Reads, size: Size, exchanged: Size) -> None:
        self._reads, self._size, self._exchanged = reads, size, exchanged
        self._own: dict[ir.Node, list[ir.Value]] = {}
        self._token: list[ir.Value] = []
        self.added: list[ir.Node] = []
        self.joins: dict[ir.Node, ir.Node] = {}
        self.came: dict[ir.Value, ir.Value] = {}
        self.bytes: dict[ir.Value, int] = {}
        self.aliases: dict[ir.Value, ir.Value] = {}

    def read(self, node: ir.Node) -> list[ir.Value]:
        """What a node reads."""
        own = self._own.get(node)
        return own if own is not None else [self.came.get(value, value) for value in self._reads(node)]

    def lead(self, one: Round) -> None:
        """Add what the main rank sends, multiplies, receives and joins in a round."""
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
        """Add what any other rank receives, multiplies and sends in a round."""
        self.came.update((value, self._receive(value, 1.0)) for value in one.takes)
        for node in self._multiply(one, {}):
            share, columns = one.products[node][one.number], node.outputs[0]
            held, sent = (int(size(columns) * share) for size in (self._size, self._exchanged))
            self._node("Send", [self._cast(columns, held, sent)], [TOKEN])

    def _multiply(self, one: Round, sent: Mapping[ir.Value, ir.Value]) -> list[ir.Node]:
        """Add the products that the rank has columns of; what comes later waits for all of them."""
        own = [node for node, shares in one.products.items() if one.number in shares]
        for node, shares in one.products.items():
            self._own[node] = [sent.get(value, self.came.get(value, value)) for value in self._reads(node)]
            self.bytes[node.outputs[0]] = int(self._size(node.outputs[0]) * shares.get(one.number, 0.0))
        self.added += own
        if own:
            self._node("After", [node.outputs[0] for node in own], [TOKEN])
        return own

    def _receive(self, value: ir.Value, share: float) -> ir.Value:
        """Add what receives a share of a value. Returns it as the engine holds it."""
        came, held = (int(size(value) * share) for size in (self._exchanged, self._size))
        return self._cast(self._node("Receive", [], [came, TOKEN])[0], came, held)

    def _cast(self, value: ir.Value, size: int, then: int) -> ir.Value:
        """The value of so many bytes, cast if it has another size then."""
        if size == then:
            return value
        cast = self._new("Cast", 1)
        self._own[cast], self.bytes[cast.outputs[0]] = [value], then
        self.added.append(cast)
        return cast.outputs[0]

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
