"""The memory that ONNX Runtime takes for what a graph's nodes make in a run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace

import onnx_ir as ir

from splitc.compiler.execution.arena import Arena, Place
from splitc.compiler.execution.engine_graph import EngineGraph
from splitc.compiler.execution.optimized import Optimized, optimize
from splitc.compiler.operators.registry import operator_of


def arena_bytes(graph: EngineGraph, scratch: Callable[[ir.Node], tuple[int, ...]], on_host: bool = True) -> int:
    """The bytes of its arena that ONNX Runtime uses in one run of a graph, from an empty arena on.

    A value is allocated before its node runs, and freed after its last reader, unless it leaves the engine. `scratch`
    is what a node's kernel allocates while it runs. Where the system places regions decides which of two free chunks of
    one size is used: on GPUs it is the more of two ways. `on_host` is as for `Arena`.
    """
    run = optimize(graph if on_host else replace(graph, shapes=None), on_host)
    held = {run.root(value) for value in run.kept}
    steps: list[Step] = []
    for node, last in zip(run.order, _last_uses(run), strict=True):
        made = tuple((v, bytes_) for v in node.outputs if v not in run.places and (bytes_ := run.size(v)))
        copy = (run.size(node.outputs[0]),) if node in run.copying else ()
        freed = tuple(value for value in last if value not in held)
        own = scratch(node) if run.is_as_in_file(node) else ()
        step, whole = _step(node, made, (*own, *copy), freed), run.made_of(node)
        # A sum overwrites the rank's own part where the file says how large it is.
        is_apart = whole is not None and graph.is_summed(whole) and not graph.alike(whole.outputs[0], whole.outputs[0])
        steps += _summed(step) if is_apart else [step]
    ways = (True,) if on_host else (True, False)
    return max(_touched(steps, Arena(on_host, downwards)) for downwards in ways)


@dataclass(frozen=True)
class Step:
    """A node's allocations: values, or parts of sums, with their bytes, and its scratch; and what is freed after it.

    Some kernels take their scratch `before` what they make. What is `reserved` is scratch that is taken past the arena.
    """

    made: tuple[tuple[Hashable, int], ...]
    freed: tuple[Hashable, ...]
    before: tuple[int, ...] = ()
    scratch: tuple[int, ...] = ()
    reserved: tuple[int, ...] = ()


def _step(
    node: ir.Node, made: tuple[tuple[Hashable, int], ...], scratch: tuple[int, ...], freed: tuple[Hashable, ...]
) -> Step:
    operator = operator_of(node)
    if operator.reserves:
        return Step(made, freed, reserved=scratch)
    return Step(made, freed, before=scratch) if operator.scratch_first else Step(made, freed, scratch=scratch)


def _summed(step: Step) -> list[Step]:
    """The step of a node that makes the rank's part of a sum, and one in which the sum is made of it."""
    parts = [(("part", value), bytes_) for value, bytes_ in step.made]
    own = {value for value, _ in step.made}
    unread = [value for value in step.freed if value in own]
    return [
        replace(step, made=tuple(parts), freed=tuple(value for value in step.freed if value not in own)),
        Step(step.made, (*dict(parts), *unread)),
    ]


def _touched(steps: Iterable[Step], arena: Arena) -> int:
    """The bytes of the arena that are used after these steps."""
    places = dict[Hashable, Place]()
    for step in steps:
        before = [arena.allocate(size) for size in step.before if size]
        places.update((value, arena.allocate(size)) for value, size in step.made)
        for place in before:
            arena.free(place)
        arena.pass_by(step.scratch)
        arena.reserve(step.reserved)
        for value in step.freed:
            if value in places:
                arena.free(places.pop(value))
    return arena.touched


def _last_uses(run: Optimized) -> list[list[ir.Value]]:
    """For each node the values that nothing uses after it."""
    death: dict[ir.Value, int] = {}
    for number, node in enumerate(run.order):
        for value in (*run.reads(node), *node.outputs):
            death[run.root(value)] = number
    dying: list[list[ir.Value]] = [[] for _ in run.order]
    for value, number in death.items():
        dying[number].append(value)
    return dying
