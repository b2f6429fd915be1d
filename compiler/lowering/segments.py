"""Cuts a rank's graph into segments at joints: communication nodes that become steps of the rank's program."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import onnx_ir as ir

from splitc.compiler.graphs.reads import is_random, node_reads, view_of
from splitc.compiler.graphs.walks import ancestors, computed_from_weights, producers, reached
from splitc.compiler.inference.folding import LONGEST
from splitc.compiler.lowering.communication import SEND, communicates, kind_of, use_operators
from splitc.compiler.lowering.open_shapes import open_shape
from splitc.compiler.lowering.rank_forms import COLLECTIVE
from splitc.compiler.nodes import inputs_of
from splitc.compiler.operators.registry import operator_of
from splitc.runtime.engines.kinds import find_kind, has_collectives
from splitc.runtime.hardware.devices import Device


@dataclass(frozen=True)
class Segment:
    """A part of a rank's graph between joints, and the joints that follow it."""

    graph: ir.Graph
    joints: tuple[ir.Node, ...]


@dataclass(frozen=True, eq=False)
class Flow:
    """Nodes in topological order with the values that they read, and the joints among them. `gives` are the outputs."""

    reads: Mapping[ir.Node, tuple[ir.Value, ...]]
    joints: frozenset[ir.Node]
    gives: frozenset[ir.Value]

    def is_end(self, node: ir.Node) -> bool:
        """Whether a node computes an output."""
        return any(value in self.gives for value in node.outputs)


def cut_segments(
    graph: ir.Graph, outputs: Collection[str], joined: Sequence[ir.Node], ordered: bool = False
) -> list[Segment]:
    """The segments of `graph` between its joints `joined`, in order. Of its outputs they compute the named ones.

    `ordered`: joints stay in their order. That is needed where ranks take part in different joints.

    A node goes into the last segment that still precedes its readers. Nodes that compute from weights alone are
    repeated in each segment that needs them, since engines fold them. Shape arithmetic on the sizes of the graph's
    inputs is repeated too: on the CPU that is cheaper than to pass the results between engines.
    """
    flow = _flow(graph, joined, ordered)
    repeated = _repeated_nodes(flow)
    position = {node: number for number, node in enumerate(flow.reads)}
    given = {value for value in graph.outputs if value.name in outputs}
    needed = ancestors([*flow.joints, *producers(given)], flow.reads.__getitem__)
    members = _members(flow, repeated, needed)
    # The last segment that reads each value.
    last = {value: level for level, nodes in enumerate(members) for node in nodes for value in flow.reads[node]}
    segments = []
    for level, nodes in enumerate(members):
        own = [node for node in nodes if node not in flow.joints]
        following = [node for node in nodes if node in flow.joints]
        leaving = given.union(value for node in following for value in inputs_of(node))
        gives = [v for node in own for v in node.outputs if v in leaving or last.get(v, 0) > level]
        if nodes:
            segments.append(Segment(_extract(graph, own, gives, repeated, position), tuple(following)))
    return segments


def _flow(graph: ir.Graph, joined: Sequence[ir.Node], ordered: bool) -> Flow:
    """The graph's nodes and joints; see `cut_segments`. What reads the result of a send reads its input, in place."""
    reads = {node: tuple(node_reads(node)) for node in graph}
    for node in joined:
        if kind_of(node) == SEND:  # as a step of the program it has no result
            node.outputs[0].replace_all_uses_with(node.inputs[0])  # type: ignore[arg-type]
    for before, after in pairwise(joined if ordered else ()):
        reads[after] += (before.outputs[0],)
    return Flow(reads, frozenset(joined), frozenset(graph.outputs))


def group_joints(flow: Flow) -> list[list[ir.Node]]:
    """The joints that would follow each segment, if the nodes were cut into the fewest segments."""
    return _members(flow, _repeated_nodes(flow), flow.joints)


def _members(flow: Flow, repeated: Collection[ir.Node], needed: Collection[ir.Node]) -> list[list[ir.Node]]:
    """The needed nodes of each segment, and the joints that follow it."""
    # All ranks must have the same segments, so nodes that this rank does not need are dropped after `_levels`.
    levels = _levels(flow, repeated)
    members: list[list[ir.Node]] = [[] for _ in range(1 + max(levels.values(), default=0))]
    for node in flow.reads:
        if node in levels and node in needed:
            members[levels[node]].append(node)
    return members


def _repeated_nodes(flow: Flow) -> frozenset[ir.Node]:
    """The nodes that compute from weights alone, and shape arithmetic on the sizes of the graph's inputs.

    Joints and the producers of their inputs are never repeated, even if they compute from weights alone.
    """
    joined = set(producers(value for node in flow.joints for value in flow.reads[node]))
    single = joined.union(flow.joints, filter(flow.is_end, flow.reads))
    inside = {node: reads for node, reads in flow.reads.items() if node not in single}
    constant = computed_from_weights(inside, is_random)
    sizes: set[ir.Node] = set()
    for node, reads in inside.items():
        if node not in constant and _is_shape_arithmetic(node, reads, sizes, constant):
            sizes.add(node)
    return frozenset(constant | sizes)


def _is_shape_arithmetic(
    node: ir.Node, reads: Sequence[ir.Value], sizes: Collection[ir.Node], constant: Collection[ir.Node]
) -> bool:
    """Whether the node is shape arithmetic on the sizes of inputs and on short constants alone."""
    operator = operator_of(node)
    if not operator.shape_arithmetic or operator.expands:
        return False
    if operator.reads_shape:
        return all(value.is_graph_input() for value in reads)
    return all(value.producer() in sizes or _is_short_constant(value, constant) for value in reads)


def _is_short_constant(value: ir.Value, constant: Collection[ir.Node]) -> bool:
    """Whether a value is computed from weights alone and has at most LONGEST elements."""
    if not value.is_initializer() and value.producer() not in constant:
        return False
    return value.shape is not None and value.shape.is_static() and math.prod(value.shape.numpy()) <= LONGEST


def _levels(flow: Flow, repeated: Collection[ir.Node]) -> dict[ir.Node, int]:
    """The number of each node's segment, without repeated nodes. A joint has the number of the segment before it.

    There are as few segments as possible. A node is as late as its readers allow, but the producer of an output is as
    early as possible, so that the output is not delayed.
    """
    early: dict[ir.Node, int] = {}
    readers: dict[ir.Value, list[ir.Node]] = {}
    for node, reads in flow.reads.items():
        if node not in repeated:
            above = [maker for maker in producers(reads) if maker in early]
            early[node] = max((early[maker] + (maker in flow.joints) for maker in above), default=0)
            for value in reads:
                readers.setdefault(value, []).append(node)
    late: dict[ir.Node, int] = {}
    for node in reversed(list(early)):
        limits = [late[reader] for value in node.outputs for reader in readers.get(value, ()) if reader in late]
        if flow.is_end(node):
            late[node] = early[node]
        elif node in flow.joints:
            late[node] = max(early[node], min(limits, default=early[node] + 1) - 1)
        else:
            late[node] = min(limits, default=early[node])
    return late


def _extract(
    graph: ir.Graph,
    nodes: list[ir.Node],
    gives: list[ir.Value],
    repeated: Collection[ir.Node],
    position: Mapping[ir.Node, int],
) -> ir.Graph:
    """A new graph of these nodes, and of the repeated nodes that they need, with outputs `gives`."""
    own = set(reached(nodes, lambda node: [maker for maker in producers(node_reads(node)) if maker in repeated]))
    ordered = sorted(own, key=position.__getitem__)
    reads = dict.fromkeys(value for node in ordered for value in node_reads(node))
    takes = [value for value in reads if not value.is_initializer() and value.producer() not in own]
    segment = view_of(graph, takes, gives, ordered).clone()
    for value in segment.inputs:
        value.shape = value.shape or open_shape(value)
    for value in (value for node in segment for value in node.outputs):
        if not value.is_graph_output() and value.shape is None:
            value.type = None
    return segment


def engine_segments(graph: ir.Graph, outputs: Collection[str], engine: str, devices: Sequence[Device]) -> list[Segment]:
    """The segments of a rank's graph, one for each engine; they compute the named `outputs`.

    `devices` are those of all ranks.
    """
    if has_operators(engine, devices):
        return [Segment(use_operators(graph, outputs), ())]
    inside = has_collectives(engine, devices)
    joints = [node for node in graph if communicates(node) and not (inside and node.op_type == COLLECTIVE)]
    return [Segment(graph, ())] if inside and not joints else cut_segments(graph, outputs, joints)


def has_operators(engine: str, devices: Sequence[Device]) -> bool:
    """Whether all communication runs inside the engines, as operators of splitc's library."""
    return has_collectives(engine, devices) and find_kind(engine).uses_operators
