"""Minimum cut of a graph between two sets of vertices, by augmenting paths (Edmonds and Karp)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping

Vertex = Hashable


class Network:
    """A flow network: vertices, and edges with capacities."""

    def __init__(self) -> None:
        # The residual capacity of each edge, by its start and end. The reverse of each edge is an edge too.
        self._left: dict[Vertex, dict[Vertex, int]] = defaultdict(lambda: defaultdict(int))

    def add(self, start: Vertex, end: Vertex, capacity: int, back: int = 0) -> None:
        """Add an edge, and one `back`."""
        self._left[start][end] += capacity
        self._left[end][start] += back

    def cut(self, sources: Iterable[Vertex], sinks: Collection[Vertex]) -> set[Vertex]:
        """The smallest set of vertices on the sources' side of a minimum cut. No source may be a sink."""
        cut_off: set[Vertex] = set()  # no path leads from these to a sink any more
        for source in sources:
            while source not in cut_off:
                before, sink = self._search(source, sinks, cut_off)
                if sink is None:
                    cut_off.update(before)
                else:
                    self._augment(before, source, sink)
        return cut_off

    def _search(
        self, source: Vertex, sinks: Collection[Vertex], left_out: Collection[Vertex]
    ) -> tuple[Mapping[Vertex, Vertex], Vertex | None]:
        """The vertices that are reached from a source, each with the one before it, and the nearest sink."""
        before: dict[Vertex, Vertex] = {source: source}
        queue = [source]
        for vertex in queue:
            for end, left in self._left[vertex].items():
                if left > 0 and end not in before and end not in left_out:
                    before[end] = vertex
                    if end in sinks:
                        return before, end
                    queue.append(end)
        return before, None

    def _augment(self, before: Mapping[Vertex, Vertex], source: Vertex, sink: Vertex) -> None:
        """Saturate a path."""
        edges = []
        while sink != source:
            edges.append((before[sink], sink))
            sink = before[sink]
        least = min(self._left[start][end] for start, end in edges)
        for start, end in edges:
            self._left[start][end] -= least
            self._left[end][start] += least
