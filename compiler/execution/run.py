"""The memory that ONNX Runtime takes for the values of one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import onnx_ir as ir

from splitc.compiler.execution.arena import Arena, Place
from splitc.compiler.execution.exchange import EngineGraph
from splitc.compiler.execution.optimized import Optimized, optimize
from splitc.compiler.execution.removed import without_noops
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.operators.scratch import between_integers

# The bytes that a node's kernel allocates while it runs.
Scratch = Callable[[ir.Node], tuple[int, ...]]


def arena_bytes(graph: EngineGraph, scratch: Scratch, on_host: bool = True) -> int:
    """The bytes that ONNX Runtime's arena uses in one run of a graph, if it is empty before.

    Of free chunks of equal size the arena takes the one at the lowest address. On GPUs regions may come at rising or
    falling addresses, so both are replayed, and the larger result is taken. `on_host` is as for `Arena`.
    """
    steps = find_steps(graph, scratch, on_host)
    arenas = [Arena(on_host, downwards) for downwards in ((True,) if on_host else (True, False))]
    for arena in arenas:
        for _ in replay(steps, arena):
            pass
    return max(arena.touched for arena in arenas)


@dataclass(frozen=True)
class Step:
    """A node's allocations: values with their bytes, its scratch, and what is freed after it.

    Scratch that some kernels allocate `before` their results comes first; `reserved` scratch is taken outside the
    arena.
    """

    made: tuple[tuple[ir.Value, int], ...]
    freed: tuple[ir.Value, ...]
    before: tuple[int, ...] = ()
    scratch: tuple[int, ...] = ()
    reserved: tuple[int, ...] = ()


def find_steps(graph: EngineGraph, scratch: Scratch, on_host: bool) -> list[Step]:
    """The allocations of one run, node by node.

    A value is allocated before its node runs. It is freed after its last reader, unless it leaves the engine.
    """
    graph = without_noops(graph)
    run = optimize(graph if on_host else replace(graph, shapes=None), on_host)
    held = {run.root(value) for value in run.kept}
    steps: list[Step] = []
    for node, last in zip(run.order, _last_uses(run), strict=True):
        made = tuple((v, bytes_) for v in node.outputs if v not in run.places and (bytes_ := run.size(v)))
        copy = (run.size(node.outputs[0]),) if node in run.copying else ()
        freed = tuple(value for value in last if value not in held)
        own = scratch(node) if run.is_as_in_file(node) else ()
        if (quantized := run.integers.get(node, node)) is not node and graph.shapes is not None:
            own = between_integers(quantized, *graph.shapes(quantized))
        steps.append(_step(node, made, (*own, *copy), freed))
    return steps


def _step(
    node: ir.Node, made: tuple[tuple[ir.Value, int], ...], scratch: tuple[int, ...], freed: tuple[ir.Value, ...]
) -> Step:
    operator = operator_of(node)
    if operator.reserves:
        return Step(made, freed, reserved=scratch)
    return Step(made, freed, before=scratch) if operator.scratch_first else Step(made, freed, scratch=scratch)


def replay(steps: Iterable[Step], arena: Arena) -> Iterator[list[Place]]:
    """Run the steps in an arena. Yields the chunks of each step's values as soon as they are allocated."""
    places = dict[ir.Value, Place]()
    for step in steps:
        before = [arena.allocate(size) for size in step.before if size]
        made = [arena.allocate(size) for _, size in step.made]
        yield made
        places.update((value, place) for (value, _), place in zip(step.made, made, strict=True))
        for place in before:
            arena.free(place)
        arena.pass_by(step.scratch)
        arena.reserve(step.reserved)
        for value in step.freed:
            if value in places:
                arena.free(places.pop(value))


def _last_uses(run: Optimized) -> list[list[ir.Value]]:
    """For each node, the values that no later node uses."""
    death: dict[ir.Value, int] = {}
    for number, node in enumerate(run.order):
        for value in (*run.reads(node), *node.outputs):
            death[run.root(value)] = number
    dying: list[list[ir.Value]] = [[] for _ in run.order]
    for value, number in death.items():
        dying[number].append(value)
    return dying
