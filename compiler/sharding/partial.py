"""Where partial values are summed. A value is partial where each rank has contracted only its shard of an axis."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Axis, Factor
from splitc.compiler.operators.operation import Operation
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.sharding.axis_map import AxisMap
from splitc.compiler.sharding.crossings import crossings


@dataclass(frozen=True)
class Sums:
    """The partial values, and where they are made whole.

    `partial` maps each partial value to the atoms that it is partial over. A rank without units of them contributes
    zero. `summed` are the values that are summed where they are made, in the model's order; the other partial values
    are passed on. `once` maps a node to the inputs that only one rank may add to a partial result. `ranged` are the
    nodes for which the ranks find the least and the greatest element together. `drawn` are those that draw random
    numbers: one rank does, the others have zeros, and what they make is summed too. `joined` are the values whose
    shards are joined at the border of an island.
    """

    partial: Mapping[ir.Value, frozenset[Factor]]
    summed: tuple[ir.Value, ...]
    once: Mapping[ir.Node, frozenset[int]]
    ranged: tuple[ir.Node, ...]
    drawn: tuple[ir.Node, ...] = ()
    joined: tuple[ir.Value, ...] = ()

    @property
    def count(self) -> int:
        """The number of collectives in a run."""
        return len(self.summed) + len(self.ranged) + len(self.joined)

    @property
    def exchanged(self) -> tuple[ir.Value, ...]:
        """The values that collectives make whole."""
        return (*self.summed, *self.joined)


# For a model without partial values.
NO_SUMS = Sums({}, (), {}, ())


def find_sums(
    axis_map: AxisMap,
    position: Mapping[ir.Node, int],
    chosen: Collection[Factor],
    start: Iterable[ir.Node],
    size: Callable[[ir.Value], int],
    drawn: Sequence[ir.Node] = (),
) -> Sums:
    """Follow partial values from the nodes that contract a chosen atom to where they must be whole.

    `start` are these nodes, and those that need the range of a chosen atom's elements. `size` gives a value's bytes.
    `drawn` are the nodes that draw random numbers.

    A partial value passes through nodes that are linear in it. It is summed at the last place where that is possible:
    before it meets a whole value (the residual), before several nodes read it, or before it grows.
    """
    partial: dict[ir.Value, frozenset[Factor]] = {}
    summed: dict[ir.Value, None] = {}
    once: dict[ir.Node, frozenset[int]] = {}
    ranged: list[ir.Node] = []
    borders = list(crossings(axis_map))
    crossed = {each.value for each in borders if each.is_cut(chosen) or each.is_joined(chosen)}
    queue = [(position[node], node) for node in start]
    heapq.heapify(queue)
    seen: set[ir.Node] = set()
    while queue:
        _, node = heapq.heappop(queue)
        if node in seen:
            continue
        seen.add(node)
        operation = axis_map.operations[node]
        over = chosen_atoms([operation.contracted], chosen)
        incoming = {
            n: partial[v] for n, v in enumerate(node.inputs) if v is not None and v in partial and v not in summed
        }
        if over:
            once[node] = frozenset(n for n in operation.add_on_one_rank if operation.has(n))
        if incoming:
            passing = _passes(operation, incoming, partial, chosen, size)
            if passing is None:
                summed.update({value: None for n in incoming if (value := node.inputs[n]) is not None})
            else:
                over = frozenset().union(over, *incoming.values())
                once[node] = passing
        if over:
            partial.update(dict.fromkeys(node.outputs, over))
            summed.update({value: None for value in node.outputs if not _is_handed_on(value, node) or value in crossed})
            for value in (value for value in node.outputs if value not in summed):
                for reader, _ in value.uses():
                    heapq.heappush(queue, (position[reader], reader))
        elif operation.needs_range and chosen_atoms(operation.inputs[0], chosen):
            ranged.append(node)
    used = (value for node in drawn for value in node.outputs if value.uses() or value.is_graph_output())
    summed.update(dict.fromkeys(used))
    in_order = sorted(summed, key=lambda value: (position[_maker(value)], value.index() or 0))
    joined = [each.value for each in borders if each.is_joined(chosen)]
    return Sums(partial, tuple(in_order), once, tuple(ranged), tuple(drawn), tuple(joined))


def _is_handed_on(value: ir.Value, node: ir.Node) -> bool:
    """Whether exactly one other node of the same graph reads a value of this node."""
    readers = [reader for reader, _ in value.uses()]
    return len(readers) == 1 and not value.is_graph_output() and readers[0].graph is node.graph


def _maker(value: ir.Value) -> ir.Node:
    node = value.producer()
    assert node is not None
    return node


def chosen_atoms(axes: Iterable[Axis] | None, chosen: Collection[Factor]) -> frozenset[Factor]:
    """The chosen atoms among the axes."""
    return frozenset(atom for axis in axes or () for atom in ax.atoms(axis) if atom in chosen)


def _passes(
    operation: Operation,
    incoming: Mapping[int, frozenset[Factor]],
    partial: Mapping[ir.Value, frozenset[Factor]],
    chosen: Collection[Factor],
    size: Callable[[ir.Value], int],
) -> frozenset[int] | None:
    """The inputs that only one rank adds, where the node may take these inputs as partial; None where it may not."""
    node = operation.node
    output = node.outputs[0]
    sizes = [size(value) for number in incoming if (value := node.inputs[number]) is not None]
    if size(output) > sum(sizes) or any(chosen_atoms(axes, chosen) for axes in operation.outputs):
        return None
    if chosen_atoms([operation.contracted], chosen) or len(node.outputs) > 1:
        return None
    given = frozenset(number for number, value in enumerate(node.inputs) if value is not None)
    additive = bool(operation.add_on_one_rank)
    # Only an addition can leave out an input that a rank contributes nothing to.
    if len(set(incoming.values())) > 1 and not additive:
        return None
    if any(together & given == incoming.keys() for together in operation.linear):
        return frozenset()
    rest = given - incoming.keys()
    weights = all(_is_weight(operation, number) for number in rest)
    joins = additive and rest <= operation.add_on_one_rank and size(output) == max(sizes)
    return rest if joins and (weights or _meets_partial(output, partial)) else None


def _is_weight(operation: Operation, number: int) -> bool:
    value = operation.node.inputs[number]
    return value is not None and value.is_initializer()


def _meets_partial(value: ir.Value, partial: Mapping[ir.Value, frozenset[Factor]]) -> bool:
    """Whether the only reader of a value adds another partial value to it: then one sum serves both."""
    uses = value.uses()
    if len(uses) != 1 or value.is_graph_output():
        return False
    reader = next(iter(uses)).node
    return operator_of(reader).is_addition and any(
        v in partial for v in reader.inputs if v is not None and v is not value
    )
