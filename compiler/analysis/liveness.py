"""Which values are live between the nodes of a sequence, and their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.operators.registry import operator_of


@dataclass(frozen=True)
class Interval:
    """When a value is live: at every gap i with birth < i <= death. Gap i lies before node i."""

    value: ir.Value
    bytes: int
    birth: int
    death: int


@dataclass(frozen=True)
class Liveness:
    """The values that cross each gap of a sequence of nodes, and their bytes.

    `running` are, for each node, the bytes live while it runs: those that cross the gap before it, and its outputs. A
    view of an input that is not read later takes no bytes of its own.
    """

    crossing: tuple[tuple[Interval, ...], ...]
    bytes: tuple[int, ...]
    running: tuple[int, ...]


def liveness(
    nodes: Sequence[ir.Node],
    reads: Callable[[ir.Node], Iterable[ir.Value]],
    size: Callable[[ir.Value], int],
) -> Liveness:
    """Liveness of values that are both made and read by the nodes. `size` gives the bytes of a value."""
    position = {node: index for index, node in enumerate(nodes)}
    death: dict[ir.Value, int] = {}
    for index, node in enumerate(nodes):
        for value in reads(node):
            if value.producer() in position:
                death[value] = index
    crossing: list[list[Interval]] = [[] for _ in nodes]
    for value, end in death.items():
        producer = value.producer()
        assert producer is not None
        interval = Interval(value, size(value), position[producer], end)
        for gap in range(interval.birth + 1, end + 1):
            crossing[gap].append(interval)
    alive = [sum(interval.bytes for interval in gap) for gap in crossing]
    dying = [{interval.value for interval in gap if interval.death == index} for index, gap in enumerate(crossing)]
    running = [
        before + sum(map(size, node.outputs)) * (not _is_in_place(node, last, size))
        for before, node, last in zip(alive, nodes, dying, strict=True)
    ]
    return Liveness(tuple(map(tuple, crossing)), tuple(alive), tuple(running))


def _is_in_place(node: ir.Node, dying: AbstractSet[ir.Value], size: Callable[[ir.Value], int]) -> bool:
    """Whether the node's result reuses the memory of its input.

    Only views do. ONNX Runtime runs elementwise operators in place only if it knows both shapes beforehand, which is
    rare.
    """
    source, result = node.inputs[0] if node.inputs else None, node.outputs[0]
    return operator_of(node).view and source in dying and source is not None and size(source) == size(result)
