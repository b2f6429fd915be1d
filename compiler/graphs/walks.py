"""Breadth-first searches over a graph, from nodes or values."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import chain
from typing import TypeVar

import onnx_ir as ir

T = TypeVar("T", bound=Hashable)


def levels(starts: Iterable[T], step: Callable[[T], Iterable[T]]) -> Iterator[list[T]]:
    """The starts, then all items one `step` away, then those two steps away, and so on; each item once."""
    level = list(dict.fromkeys(starts))
    seen = set(level)
    while level:
        yield level
        following = dict.fromkeys(chain.from_iterable(map(step, level)))
        level = [item for item in following if item not in seen]
        seen.update(level)


def reached(starts: Iterable[T], step: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """The starts and all items that `step` leads to from them, each once, nearest first."""
    return chain.from_iterable(levels(starts, step))


def producers(values: Iterable[ir.Value | None]) -> Iterator[ir.Node]:
    """The producers of these values. Inputs, initializers and None have none."""
    return (node for value in values if value is not None and (node := value.producer()) is not None)


def producer_of(value: ir.Value) -> ir.Node:
    """The producer of a value that is neither an input nor an initializer."""
    (node,) = producers([value])
    return node


def ancestors(nodes: Iterable[ir.Node], reads: Callable[[ir.Node], Iterable[ir.Value]]) -> set[ir.Node]:
    """The nodes and all nodes that they depend on. `reads` returns the values that a node reads."""
    return set(reached(nodes, lambda node: producers(reads(node))))


def computed_from_weights(
    reads: Mapping[ir.Node, Iterable[ir.Value]], excluded: Callable[[ir.Node], bool]
) -> frozenset[ir.Node]:
    """The nodes that depend on weights alone, and on no `excluded` node. `reads` are in topological order."""
    computed: set[ir.Node] = set()
    for node, values in reads.items():
        if all(value.is_initializer() or value.producer() in computed for value in values) and not excluded(node):
            computed.add(node)
    return frozenset(computed)
