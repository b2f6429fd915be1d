"""Stages: consecutive blocks, with the values that they take from, and give to, other stages and the caller."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from splitc.compiler.analysis.blocks import Block, Partition
from splitc.compiler.graphs.reads import given_sizes
from splitc.compiler.graphs.walks import producer_of, producers, reached
from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.states.own_sizes import exists_for_its_size, has_own_size

Place = tuple[ir.Value, int]


@dataclass(frozen=True)
class Stage:
    """What one group of devices runs, in terms of the whole model's values.

    - `nodes`: the nodes of its blocks and the rematerializable ones that they need, in the model's order.
    - `feeds`, `outputs`: inputs and outputs of the model.
    - `receives`, `sends`: values from, and for, other stages.
    - `borrowed`: shape vectors of values that the stage does not have. It reads the same sizes off other values.
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
    """Stages of consecutive blocks, followed by one for each device with placed weights.

    `ends` are, for each stage of blocks, the number of its last block plus one. The first stage computes outputs that
    depend only on rematerializable nodes, such as a mask.
    """
    runs = [partition.blocks[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    runs += [placed.blocks for placed in partition.placed]
    home = {node: number for number, blocks in enumerate(runs) for block in blocks for node in block.nodes}
    outputs: list[list[ir.Value]] = [[] for _ in runs]
    for value in graph.graph.outputs:
        outputs[home.get(producer_of(value), 0)].append(value)
    stages = [_stage(graph, partition, home, number, blocks, outputs[number]) for number, blocks in enumerate(runs)]
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

    Its nodes are those of its blocks, and all that they and its outputs depend on, except nodes of other stages.
    """

    def reads(node: ir.Node) -> Sequence[ir.Value]:
        return () if node in partition.shapes else graph.reads[node]

    def is_elsewhere(node: ir.Node) -> bool:
        return home.get(node, number) != number

    def above(node: ir.Node) -> Iterator[ir.Node]:
        return (maker for maker in producers(reads(node)) if not is_elsewhere(maker))

    ends = [*itertools.chain.from_iterable(block.nodes for block in blocks), *map(producer_of, outputs)]
    nodes = sorted(reached(ends, above), key=graph.position.__getitem__)
    read = dict.fromkeys(value for node in nodes for value in reads(node))
    sized = (value for node in nodes if node in partition.shapes for value in graph.reads[node])
    feeds = [value for value in dict.fromkeys([*read, *filter(_is_for_its_sizes, sized)]) if value.is_graph_input()]
    receives = [value for value in read if (maker := value.producer()) is not None and is_elsewhere(maker)]
    # A Shape node stays if the stage has the value that it reads; otherwise its result is borrowed.
    present = {*feeds, *receives, *(value for node in nodes for value in node.outputs)}
    absent = dict.fromkeys(n for n in nodes if n in partition.shapes and present.isdisjoint(graph.reads[n]))
    borrowed = [node.outputs[0] for node in absent]
    # If values are received while a stage runs, one may arrive too late to read sizes from it.
    seen = feeds if partition.placed else [*receives, *feeds]
    fed = {*feeds, *_missing_sizes(graph, borrowed, seen)}

    def arrival(value: ir.Value) -> tuple[int, int, int | None]:
        maker = producer_of(value)
        return home[maker], graph.position[maker], value.index()

    return Stage(
        blocks=blocks,
        nodes=tuple(node for node in nodes if node not in absent),
        feeds=tuple(value for value in graph.graph.inputs if value in fed),
        receives=tuple(sorted(receives, key=arrival)),
        sends=(),
        outputs=tuple(outputs),
        borrowed=tuple(borrowed),
    )


def _is_for_its_sizes(value: ir.Value) -> bool:
    """Whether a value is an input of the caller of which only sizes are read, which other values may not have."""
    if not value.is_graph_input() or exists_for_its_size(value):
        return False
    return all(use.node.op_type == "Shape" for use in value.uses())


def _missing_sizes(graph: Graph, borrowed: Sequence[ir.Value], seen: Sequence[ir.Value]) -> list[ir.Value]:
    """The model's inputs that a stage takes only for their sizes, which no other value that it takes has."""
    needed: list[ir.Value] = []
    for value in borrowed:
        for size in borrowed_sizes(value):
            if not isinstance(size, int) and find_size(size, [*seen, *needed]) is None:
                place = find_size(size, graph.graph.inputs)
                assert place is not None, "a shape is only rematerializable if the inputs have its sizes"
                needed.append(place[0])
    return needed


def borrowed_sizes(value: ir.Value) -> list[int | ir.SymbolicDim]:
    """The sizes that a Shape node returns: those of its input, from `start` to `end`."""
    node = producer_of(value)
    source = node.inputs[0]
    assert source is not None and source.shape is not None
    return given_sizes(node, source.shape)


def find_size(size: ir.SymbolicDim, values: Sequence[ir.Value]) -> Place | None:
    """The first value with an axis of this size, and the axis. Not one with spare capacity, or that may be omitted."""
    for value in values:
        for axis, other in enumerate(value.shape or ()):
            if other == size and not has_own_size(value, axis):
                return value, axis
    return None
