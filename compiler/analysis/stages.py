"""Stages: runs of blocks, and what each takes from other stages and from the caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from splitc.compiler.analysis.blocks import Block, Partition
from splitc.compiler.frontend.graph import Graph

Place = tuple[ir.Value, int]


@dataclass(frozen=True)
class Stage:
    """What one group of devices runs, in terms of the whole model's values.

    `nodes` are those of its blocks and the rematerializable ones that they need, in the model's order. `feeds` are
    inputs of the model, `outputs` its outputs. `receives` come from earlier stages, `sends` go to later ones.
    `borrowed` are shape vectors of values that the stage does not have: it reads the same sizes off other values.
    """

    blocks: tuple[Block, ...]
    nodes: tuple[ir.Node, ...]
    feeds: tuple[ir.Value, ...]
    receives: tuple[ir.Value, ...]
    sends: tuple[ir.Value, ...]
    outputs: tuple[ir.Value, ...]
    borrowed: tuple[ir.Value, ...]

    @property
    def takes(self) -> tuple[ir.Value, ...]:
        """The inputs of its engine: from the caller, then from other stages."""
        return (*self.feeds, *self.receives)

    @property
    def gives(self) -> tuple[ir.Value, ...]:
        """The outputs of its engine: to the caller, then to other stages, each value once."""
        return tuple(dict.fromkeys((*self.outputs, *self.sends)))


def divide_blocks(graph: Graph, partition: Partition, ends: Sequence[int]) -> list[Stage]:
    """Stages of consecutive blocks. `ends` are, for each stage, the number of its last block plus one.

    An output that only depends on rematerializable nodes (a mask) is given by the first stage.
    """
    home = {
        node: number
        for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
        for block in partition.blocks[start:end]
        for node in block.nodes
    }
    outputs: list[list[ir.Value]] = [[] for _ in ends]
    for value in graph.graph.outputs:
        producer = value.producer()
        assert producer is not None, "every output has a node of its own in a normalized graph"
        outputs[home.get(producer, 0)].append(value)
    stages = [
        _stage(graph, partition, home, number, partition.blocks[start:end], outputs[number])
        for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    wanted = {value for stage in stages for value in stage.receives}
    return [
        replace(stage, sends=tuple(v for n in stage.nodes if home.get(n) == number for v in n.outputs if v in wanted))
        for number, stage in enumerate(stages)
    ]


def _stage(
    graph: Graph,
    partition: Partition,
    home: Mapping[ir.Node, int],
    number: int,
    blocks: tuple[Block, ...],
    outputs: Sequence[ir.Value],
) -> Stage:
    """One stage without its `sends`.

    Its nodes are found upstream from its blocks and outputs, through rematerializable nodes, up to other stages.
    """
    nodes: set[ir.Node] = set()
    feeds: dict[ir.Value, None] = {}
    receives: dict[ir.Value, None] = {}
    stack = [node for block in blocks for node in block.nodes] + [_producer(value) for value in outputs]
    while stack:
        node = stack.pop()
        if node in nodes:
            continue
        nodes.add(node)
        for value in () if node in partition.shapes else graph.reads[node]:
            producer = value.producer()
            if producer is None:
                if not value.is_initializer():
                    feeds[value] = None
            elif home.get(producer, number) == number:
                stack.append(producer)
            else:
                receives[value] = None
    # A Shape node stays if the value that it reads is there anyway; otherwise its result is borrowed.
    borrowed = []
    for node in nodes & partition.shapes:
        (value,) = graph.reads[node]
        if value.producer() not in nodes and value not in feeds and value not in receives:
            borrowed.append(node.outputs[0])
    borrowed.sort(key=lambda value: graph.position[_producer(value)])
    fed = {*feeds, *_missing_sizes(graph, borrowed, [*receives, *feeds])}

    def arrival(value: ir.Value) -> tuple[int, int, int | None]:
        producer = _producer(value)
        return home[producer], graph.position[producer], value.index()

    return Stage(
        blocks=blocks,
        nodes=tuple(sorted(nodes - {_producer(value) for value in borrowed}, key=graph.position.__getitem__)),
        feeds=tuple(value for value in graph.graph.inputs if value in fed),
        receives=tuple(sorted(receives, key=arrival)),
        sends=(),
        outputs=tuple(outputs),
        borrowed=tuple(borrowed),
    )


def _producer(value: ir.Value) -> ir.Node:
    producer = value.producer()
    assert producer is not None
    return producer


def _missing_sizes(graph: Graph, borrowed: Sequence[ir.Value], seen: Sequence[ir.Value]) -> list[ir.Value]:
    """The model's inputs that a stage takes only to read their sizes, which no other value of it has."""
    needed: list[ir.Value] = []
    for value in borrowed:
        for size in borrowed_sizes(value):
            if not isinstance(size, int) and find_size(size, [*seen, *needed]) is None:
                place = find_size(size, graph.graph.inputs)
                assert place is not None, "a shape is only rematerializable if the inputs have its sizes"
                needed.append(place[0])
    return needed


def borrowed_sizes(value: ir.Value) -> list[int | ir.SymbolicDim]:
    """The sizes that a Shape node gives: those of the value that it reads, from `start` to `end`."""
    node = _producer(value)
    source = node.inputs[0]
    assert source is not None and source.shape is not None
    return list(source.shape)[node.attributes.get_int("start", 0) : node.attributes.get_int("end", None)]


def find_size(size: ir.SymbolicDim, values: Sequence[ir.Value]) -> Place | None:
    """The first value with an axis of this size, and the axis."""
    for value in values:
        for axis, other in enumerate(value.shape or ()):
            if other == size:
                return value, axis
    return None
