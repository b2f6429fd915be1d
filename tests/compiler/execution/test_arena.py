"""The replayed arena, against cases counted by hand."""

from __future__ import annotations

import itertools
import random

from splitc.compiler.execution.arena import FIRST_REGION, UNIT, Arena, Place

MIB = 1 << 20


def test_sizes_are_rounded_and_freed_memory_is_used_again() -> None:
    arena = Arena(on_host=False)
    first = arena.allocate(1)
    arena.allocate(300)
    assert arena.touched == UNIT + 2 * UNIT
    arena.free(first)
    arena.allocate(200)
    assert arena.touched == 3 * UNIT


def test_neighbours_are_joined() -> None:
    arena = Arena(on_host=False)
    chunks = [arena.allocate(UNIT) for _ in range(3)]
    for chunk in (chunks[0], chunks[2], chunks[1]):
        arena.free(chunk)
    arena.allocate(FIRST_REGION)
    assert arena.touched == FIRST_REGION


def test_regions_double_and_chunks_of_less_than_twice_the_size_are_given_whole() -> None:
    """After regions of 1, 2 and 4 MiB: of 8 MiB, 5 leave no rest, so that 2 more need another region."""
    arena = Arena(on_host=False)
    for _ in range(3):
        arena.allocate(FIRST_REGION)
    assert arena.touched == 3 * MIB
    arena = Arena(on_host=False)
    arena.allocate(5 * MIB)
    arena.allocate(2 * MIB)
    assert arena.touched == (5 + 2) * MIB


def test_reserved_blocks_leave_gaps_between_regions() -> None:
    """A gap grows while it ends the heap, and then serves smaller blocks."""
    arena = Arena(on_host=False)
    arena.allocate(FIRST_REGION)
    arena.reserve([300, 200])
    arena.reserve([500])
    assert arena.touched == FIRST_REGION + 500
    arena.allocate(FIRST_REGION)
    arena.reserve([400, 700])
    assert arena.touched == 2 * FIRST_REGION + 500 + 700


def test_what_is_noted_of_regions_takes_a_share_of_them() -> None:
    """Of a region's whole size, whatever is used of it: 8 bytes for each 256."""
    arena = Arena()
    arena.allocate(FIRST_REGION)
    arena.allocate(UNIT)
    assert arena.touched == FIRST_REGION + UNIT + 3 * FIRST_REGION // 32


def test_random_allocations_never_overlap() -> None:
    chance = random.Random(0)
    arena, held = Arena(on_host=False), dict[Place, int]()
    for _ in range(3000):
        if held and chance.random() < 0.5:
            place = chance.choice(list(held))
            del held[place]
            arena.free(place)
        else:
            size = chance.choice([1, 1000, 70_000, 3 * MIB])
            held[arena.allocate(size)] = size
        spans = sorted((region, offset, offset + size) for (region, offset), size in held.items())
        assert all(a[0] < b[0] or a[2] <= b[1] for a, b in itertools.pairwise(spans))
    for place in held:
        arena.free(place)
    assert arena.touched < 200 * MIB
