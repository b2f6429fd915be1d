"""Which values are alive between the nodes of a sequence, and how many bytes they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True)
class Interval:
    """A value is alive at gap i, which lies before node i, when birth < i <= death."""

    value: ir.Value
    bytes: int
    birth: int
    death: int


@dataclass(frozen=True)
class Liveness:
    """The values that cross each gap of a sequence of nodes, and their bytes.

    `running` is, for each node, the bytes alive while it runs: what crosses the gap before it, and what it makes.
    """

    crossing: tuple[tuple[Interval, ...], ...]
    bytes: tuple[int, ...]
    running: tuple[int, ...]


def liveness(
    nodes: Sequence[ir.Node],
    reads: Callable[[ir.Node], Iterable[ir.Value]],
    size: Callable[[ir.Value], int],
) -> Liveness:
    """Liveness of what the nodes make for each other; what comes from elsewhere does not count."""
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
    running = [before + sum(map(size, node.outputs)) for before, node in zip(alive, nodes)]
    return Liveness(tuple(map(tuple, crossing)), tuple(alive), tuple(running))
