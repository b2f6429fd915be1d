"""Minimum cut of a graph between two sets of vertices, by Dinic's algorithm."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence


class Network:
    """A flow network: numbered vertices, and edges with capacities."""

    def __init__(self, vertices: int) -> None:
        self._edges: list[list[int]] = [[] for _ in range(vertices)]  # the numbers of each vertex's edges
        self._ends: list[int] = []
        # The residual capacity of each edge. The reverse of edge `n` is `n ^ 1`.
        self._left: list[float] = []

    def add_vertex(self) -> int:
        """A new vertex."""
        self._edges.append([])
        return len(self._edges) - 1

    def add(self, start: int, end: int, capacity: float) -> None:
        """Add an edge."""
        for one, other, left in ((start, end, capacity), (end, start, 0.0)):
            self._edges[one].append(len(self._ends))
            self._ends.append(other)
            self._left.append(left)

    def cut(self, sources: Iterable[int], sinks: Iterable[int]) -> set[int]:
        """The smallest set of vertices on the sources' side of a minimum cut.

        There must be a cut of finite capacity.
        """
        source, sink = self.add_vertex(), self.add_vertex()
        for vertex in sources:
            self.add(source, vertex, math.inf)
        for vertex in sinks:
            self.add(vertex, sink, math.inf)
        while True:
            levels = self._levels(source)
            if levels[sink] < 0:
                return {vertex for vertex, level in enumerate(levels) if level >= 0} - {source}
            untried = [0] * len(self._edges)
            while self._augment(source, sink, levels, untried):
                pass

    def _levels(self, source: int) -> list[int]:
        """The distance of each vertex from the source in edges; -1 if it can't be reached."""
        levels = [-1] * len(self._edges)
        levels[source] = 0
        queue = deque([source])
        while queue:
            vertex = queue.popleft()
            for edge in self._edges[vertex]:
                end = self._ends[edge]
                if self._left[edge] > 0 and levels[end] < 0:
                    levels[end] = levels[vertex] + 1
                    queue.append(end)
        return levels

    def _augment(self, source: int, sink: int, levels: Sequence[int], untried: list[int]) -> bool:
        """Saturate one more path to the sink along growing levels. Returns whether there is one."""
        way: list[int] = []
        vertex = source
        while vertex != sink:
            edges = self._edges[vertex]
            while untried[vertex] < len(edges):
                edge = edges[untried[vertex]]
                if self._left[edge] > 0 and levels[self._ends[edge]] == levels[vertex] + 1:
                    break
                untried[vertex] += 1
            if untried[vertex] < len(edges):
                way.append(edges[untried[vertex]])
                vertex = self._ends[way[-1]]
            elif way:
                vertex = self._ends[way.pop() ^ 1]
                untried[vertex] += 1
            else:
                return False
        least = min(self._left[edge] for edge in way)
        for edge in way:
            self._left[edge] -= least
            self._left[edge ^ 1] += least
        return True
