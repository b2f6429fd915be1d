"""The least cut, compared with all cuts."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from collections.abc import Set as AbstractSet

from hypothesis import given
from hypothesis import strategies as st

from splitc.compiler.placement.least_cut import Network

EDGES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 9)), max_size=14)


@given(EDGES)
def test_it_is_the_least_and_has_the_fewest_vertices(edges: list[tuple[int, int, int]]) -> None:
    """Vertex 0 is a source, vertex 5 a sink."""
    network = Network()
    for start, end, capacity in edges:
        network.add(start, end, capacity)

    def cost(side: AbstractSet[Hashable]) -> int:
        return sum(capacity for start, end, capacity in edges if start in side and end not in side)

    sides = [{0, *inner} for count in range(5) for inner in itertools.combinations(range(1, 5), count)]
    chosen = network.cut([0], [5])
    least = min(map(cost, sides))
    assert cost(chosen) == least
    assert len(chosen) == min(len(side) for side in sides if cost(side) == least)
