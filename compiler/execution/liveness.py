"""Live ranges: which values are live between the nodes of a sequence, and their bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import onnx_ir as ir

from splitc.compiler.graphs.walks import producer_of
from splitc.compiler.operators.registry import operator_of

Reads = Callable[[ir.Node], Iterable[ir.Value]]
Size = Callable[[ir.Value], int]
# Whether two values have the same shape in each request, as far as the file says.
Alike = Callable[[ir.Value, ir.Value], bool]


@dataclass(frozen=True)
class Nodes:
    """Nodes in order, and the values that each reads. Those that leave the engine are `kept`."""

    order: Sequence[ir.Node]
    reads: Reads
    kept: Container[ir.Value] = frozenset()

    @cached_property
    def readers(self) -> Mapping[ir.Value, Sequence[ir.Node]]:
        """The nodes that read each value, once for each use."""
        readers: dict[ir.Value, list[ir.Node]] = {}
        for node in self.order:
            for value in self.reads(node):
                readers.setdefault(value, []).append(node)
        return readers

    def only_reader(self, value: ir.Value) -> ir.Node | None:
        """The only reader of a value; None if it has several, none, or is kept."""
        own = self.readers.get(value, ())
        return own[0] if len(own) == 1 and value not in self.kept else None

    def without(
        self, gone: Container[ir.Node], own: Mapping[ir.Node, Sequence[ir.Value]] = MappingProxyType({})
    ) -> Nodes:
        """A copy without the nodes that are `gone`. Those in `own` read other values than before."""

        def read(node: ir.Node) -> Iterable[ir.Value]:
            return own[node] if node in own else self.reads(node)

        return Nodes([node for node in self.order if node not in gone], read if own else self.reads, self.kept)


def crossing_values(nodes: Sequence[ir.Node], reads: Reads) -> list[list[ir.Value]]:
    """For each node, the values that are live in the gap before it: made earlier, and read by it or a later node."""
    crossing: list[list[ir.Value]] = [[] for _ in nodes]
    position, death = _lives(nodes, reads)
    for value, end in death.items():
        for gap in range(position[producer_of(value)] + 1, end + 1):
            crossing[gap].append(value)
    return crossing


def total_bytes(nodes: Sequence[ir.Node], reads: Reads, size: Size) -> int:
    """The sum over all gaps of the bytes that cross them, in a third of the time of `crossing_values`."""
    position, death = _lives(nodes, reads)
    return sum(size(value) * (end - position[producer_of(value)]) for value, end in death.items())


def peak_bytes(nodes: Sequence[ir.Node], reads: Reads, size: Size) -> int:
    """The most bytes that are live while any node runs, counting only values that the nodes both make and read.

    They are the values that cross the gap before the node, and its outputs. A view of an input that is not read later
    takes no bytes of its own.
    """
    position, death = _lives(nodes, reads)
    change = [0] * (len(nodes) + 1)
    for value, end in death.items():
        alive = size(value)
        change[position[producer_of(value)] + 1] += alive
        change[end + 1] -= alive
    peak = 0
    for index, (node, alive) in enumerate(zip(nodes, itertools.accumulate(change), strict=False)):
        is_last = any(value is not None and death.get(value) == index for value in node.inputs[:1])
        peak = max(peak, alive + (0 if is_last and is_view(node, size) else sum(map(size, node.outputs))))
    return peak


def _lives(nodes: Sequence[ir.Node], reads: Reads) -> tuple[dict[ir.Node, int], dict[ir.Value, int]]:
    """The position of each node, and of the last reader of each value that the nodes both make and read."""
    position = {node: index for index, node in enumerate(nodes)}
    death: dict[ir.Value, int] = {}
    for index, node in enumerate(nodes):
        for value in reads(node):
            if value.producer() in position:
                death[value] = index
    return position, death


def is_view(node: ir.Node, size: Size) -> bool:
    """Whether the node's result is its first input's memory.

    (ONNX Runtime runs elementwise operators in place only if both shapes are static, which is rare.)
    """
    source = node.inputs[0] if operator_of(node).is_view and node.inputs else None
    return source is not None and size(source) == size(node.outputs[0])
