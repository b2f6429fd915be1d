"""Cut a rank's graph at its sums, for engines that can't do those: the program then does them between the pieces."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.costs import RANDOM
from splitc.compiler.graph import node_reads
from splitc.compiler.split.rank_graph import COLLECTIVE


@dataclass(frozen=True)
class Collective:
    """What the ranks do together: `operation` is `sum` or `max`, of each one's `part`; all get the `whole`."""

    operation: str
    part: str
    whole: str


@dataclass(frozen=True)
class Segment:
    """A piece of a rank's graph, and the collectives that follow it."""

    graph: ir.Graph
    collectives: tuple[Collective, ...]


def cut_segments(graph: ir.Graph, outputs: Collection[str]) -> list[Segment]:
    """The pieces of `graph` between its sums, in order. Of its outputs only those named are given.

    A node goes into the last piece that is early enough for those that read it. What is computed from weights alone
    is computed in each piece that needs it, where the engine folds it.
    """
    constant = _constant_nodes(graph)
    # All ranks must come to the same pieces, so what this one does not give is only taken off then.
    levels = _levels(graph, constant)
    needed = _needed(graph, outputs)
    count = 1 + max(levels.values(), default=0)
    members: list[list[ir.Node]] = [[] for _ in range(count)]
    for node in graph:
        if node in levels and node in needed:
            members[levels[node]].append(node)
    given = {value for value in graph.outputs if value.name in outputs}
    # The last piece that reads each value.
    last = {value: level for level, nodes in enumerate(members) for node in nodes for value in node_reads(node)}
    pieces = []
    for level, nodes in enumerate(members):
        own = [node for node in nodes if node.op_type != COLLECTIVE]
        sums = [node for node in nodes if node.op_type == COLLECTIVE]
        parts = {node.inputs[0] for node in sums}
        gives = [v for n in own for v in n.outputs if last.get(v, 0) > level or v in parts or v in given]
        if own or sums:
            piece = _extract(graph, own, gives, constant)
            pieces.append(Segment(piece, tuple(map(_collective, sums))))
    return pieces


def _collective(node: ir.Node) -> Collective:
    operation = node.attributes.get_string("reduce_op", "sum")
    return Collective(operation, _name(node.inputs[0]), _name(node.outputs[0]))


def _name(value: ir.Value | None) -> str:
    return (value.name if value is not None else None) or ""


def _constant_nodes(graph: ir.Graph) -> frozenset[ir.Node]:
    """The nodes that compute from weights alone."""
    found: set[ir.Node] = set()
    for node in graph:
        given = node.op_type in RANDOM or any(value.is_graph_output() for value in node.outputs)
        if not given and all(v.is_initializer() or v.producer() in found for v in node_reads(node)):
            found.add(node)
    return frozenset(found)


def _needed(graph: ir.Graph, outputs: Collection[str]) -> set[ir.Node]:
    """The nodes that stand above the outputs and the sums."""
    needed: set[ir.Node] = set()
    stack = [node for node in graph if node.op_type == COLLECTIVE]
    stack += [node for node in graph if any(v.is_graph_output() and v.name in outputs for v in node.outputs)]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += [producer for value in node_reads(node) if (producer := value.producer()) is not None]
    return needed


def _levels(graph: ir.Graph, constant: Collection[ir.Node]) -> dict[ir.Node, int]:
    """For each node that is not constant the number of the piece that it goes into.

    A sum has the number of the piece that it follows. Pieces are as few as can be; in them a node is as late as its
    readers allow, but what is an output is made early, and so is not held up.
    """
    early: dict[ir.Node, int] = {}
    readers: dict[ir.Value, list[ir.Node]] = {}
    for node in graph:
        if node not in constant:
            above = [producer for value in node_reads(node) if (producer := value.producer()) in early]
            early[node] = max((early[p] + (p.op_type == COLLECTIVE) for p in above if p is not None), default=0)
            for value in node_reads(node):
                readers.setdefault(value, []).append(node)
    late: dict[ir.Node, int] = {}
    for node in reversed(list(early)):
        limits = [late[reader] for value in node.outputs for reader in readers.get(value, ()) if reader in late]
        if node.op_type == COLLECTIVE:
            late[node] = max(early[node], min(limits, default=early[node] + 1) - 1)
        elif any(value.is_graph_output() for value in node.outputs):
            late[node] = early[node]
        else:
            late[node] = min(limits, default=early[node])
    return late


def _extract(graph: ir.Graph, nodes: list[ir.Node], gives: list[ir.Value], constant: Collection[ir.Node]) -> ir.Graph:
    """A graph of its own of these nodes and the constant ones that they need."""
    own = set(nodes)
    stack = list(nodes)
    while stack:
        for value in node_reads(stack.pop()):
            producer = value.producer()
            if producer is not None and producer in constant and producer not in own:
                own.add(producer)
                stack.append(producer)
    ordered = [node for node in graph if node in own]
    reads = dict.fromkeys(value for node in ordered for value in node_reads(node))
    weights = [value for value in reads if value.is_initializer()]
    takes = [value for value in reads if not value.is_initializer() and value.producer() not in own]
    view = ir.GraphView(
        takes,
        gives,
        nodes=ordered,
        initializers=tuple(weights),
        opset_imports=graph.opset_imports,
        name=graph.name,
    )
    piece = view.clone()
    for value in (value for node in piece for value in node.outputs):
        if not value.is_graph_output() and value.shape is None:
            value.type = None
    return piece
