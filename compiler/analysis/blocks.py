"""Finds a model's blocks by its structure: a model may be cut between blocks.

- The *main path* consists of the nodes that are not rematerializable (`rematerialization`): most of the computation.
- The main path is put in an order with few live bytes. It may be cut in the *gaps* between heavy nodes, each where the
  fewest bytes cross.
- The narrowest gaps divide the main path into *stretches*, such as attention and feed-forward layers. Stretches that
  repeat form blocks. If nothing repeats, every gap bounds a block.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import onnx_ir as ir

from splitc.compiler.adapters.slots import is_inside_slot, is_slot_sum
from splitc.compiler.analysis.costs import Costs
from splitc.compiler.analysis.passed_types import why_not_passed
from splitc.compiler.analysis.rematerialization import find_known_shapes, find_rematerializable, find_upstream
from splitc.compiler.execution.liveness import crossing_values, total_bytes
from splitc.compiler.normal_form.graph import Graph

# These shares and factors are choices: with them, blocks are those that people would draw. Their influence was measured
# on 43 models of all kinds, split in layer mode over two devices. In brackets: other values, and the number of plans
# that stay the same with them.

# A node is heavy if it has this share of the model's weights, or of its products' operations. Cuts lie between heavy
# nodes (3e-5: 32; 3e-4: 36).
HEAVY_SHARE = 1e-4
# Gaps are equally narrow if their live bytes differ by no more than this factor (1.1: 40; 1.5: 33).
LEVEL = 1.25
# Blocks are alike if they have this share of their operators in common (0.6: 40; 0.85: 39). The first and the last
# block may differ more (0.4: 42; 0.75: 43).
ALIKE = 0.75
ALIKE_AT_ENDS = 0.5
# The least share of the main path's nodes that repeated blocks have in common (0.5: 42; 0.8: 39).
REPEATED_SHARE = 2 / 3
# A repetition with narrower gaps must cover this share of the nodes that the best repetition covers (0.7, 1: 41).
COVERED_SHARE = 0.9
# The model's own order is replaced if it has more than this many times the live bytes of another (1: 39; 4: 43).
BETTER_ORDER = 2
# The most blocks if nothing repeats: the planner's search takes time quadratic in their number (64: 38; 256: 42).
MOST_BLOCKS = 128


@dataclass(frozen=True)
class Block:
    """Consecutive nodes of the main path. `kind` is `prologue`, `block`, `epilogue`, or PLACED (a part of a block)."""

    name: str
    kind: str
    nodes: tuple[ir.Node, ...]


# The kind of a block's part that is on another device than the rest of it.
PLACED = "placed"


@dataclass(frozen=True)
class Placed:
    """The weights that a device holds apart from their blocks, and the parts of blocks that it runs with them."""

    device: str
    weights: tuple[ir.Value, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Partition:
    """A graph's blocks in order, and the rematerializable nodes, which belong to no block.

    - `finest`: every gap bounds a block, since nothing repeats or more blocks were wanted.
    - `shapes`: the Shape nodes whose sizes are all sizes of model inputs: a stage does not need the values that they
      read.
    - `upstream`: maps each node of a block to the rematerializable nodes that it depends on.
    - `placed`: placed weights with their nodes, which are in no block.
    """

    blocks: tuple[Block, ...]
    finest: bool
    rematerializable: frozenset[ir.Node]
    shapes: frozenset[ir.Node]
    upstream: Mapping[ir.Node, frozenset[ir.Node]]
    placed: tuple[Placed, ...] = ()

    @cached_property
    def position(self) -> Mapping[ir.Node, int]:
        """The index of each node in the order of the main path, including placed nodes."""
        return {node: index for index, node in enumerate(self.upstream)}

    def with_upstream(self, block: Block) -> frozenset[ir.Node]:
        """The block's nodes and the rematerializable ones that they depend on."""
        return frozenset(block.nodes).union(*(self.upstream[node] for node in block.nodes))


def find_blocks(graph: Graph, costs: Costs, wanted: int = 1) -> Partition:
    """The graph's blocks: repeated ones, or finer ones if fewer than `wanted` repeat."""
    shapes = find_known_shapes(graph)
    rematerializable = find_rematerializable(graph, costs, shapes)
    if len(rematerializable) == len(graph.nodes):  # in a very cheap model, the main path would be empty
        rematerializable = shapes = frozenset()
    main_path = _order_main_path(graph, costs, rematerializable)
    upstream = find_upstream(graph, rematerializable, shapes, main_path)
    gaps = _find_gaps(graph, costs, main_path, upstream)
    blocks = _repeated_blocks(main_path, gaps)
    finest = len(blocks) < wanted or not blocks
    if finest:
        blocks = _blocks_between(main_path, sorted(gap.last for gap in _narrowest(gaps, MOST_BLOCKS - 1)))
    return Partition(tuple(blocks), finest, rematerializable, shapes, upstream)


def _order_main_path(graph: Graph, costs: Costs, rematerializable: frozenset[ir.Node]) -> list[ir.Node]:
    """The nodes that are not rematerializable, in topological order.

    The order is the file's, unless a depth-first order has far fewer live bytes (BETTER_ORDER). Exporters write nodes
    in execution order, which is a good one, but some tools shuffle them.
    """
    reads, size = graph.reads.__getitem__, partial(_size, costs)
    as_written = [node for node in graph.nodes if node not in rematerializable]
    depth_first = _depth_first(graph, rematerializable)
    is_better = BETTER_ORDER * total_bytes(depth_first, reads, size) < total_bytes(as_written, reads, size)
    return depth_first if is_better else as_written


def _size(costs: Costs, value: ir.Value) -> int:
    """A value's bytes; one if its size is unknown, so that a cut there is not free."""
    return max(1, costs.value_bytes(value))


def _depth_first(graph: Graph, left_out: frozenset[ir.Node]) -> list[ir.Node]:
    """Post-order from the outputs: a node comes right after its inputs."""
    order: dict[ir.Node, None] = {}
    opened: set[ir.Node] = set()
    stack = [value.producer() for value in reversed(graph.graph.outputs)]
    while stack:
        node = stack[-1]
        if node is None or node in left_out or node in order:
            stack.pop()
        elif node in opened:
            stack.pop()
            order[node] = None
        else:
            opened.add(node)
            stack += [value.producer() for value in reversed(graph.reads[node])]
    return list(order)


@dataclass(frozen=True)
class Gap:
    """A gap between two heavy nodes: the fewest `bytes` cross before the nodes from number `first` to `last`."""

    first: int
    last: int
    bytes: int


def _find_gaps(
    graph: Graph, costs: Costs, main_path: Sequence[ir.Node], upstream: Mapping[ir.Node, frozenset[ir.Node]]
) -> list[Gap]:
    """The narrowest place between each two consecutive heavy nodes. No cut goes through a slot: see `_splits_slot`."""
    inside = list(map(is_inside_slot, main_path))
    products = [
        costs.flops(node) if costs.is_product(node) and not own else 0
        for node, own in zip(main_path, inside, strict=True)
    ]
    weights = [
        0 if own else costs.weight_bytes([node, *upstream[node]]) for node, own in zip(main_path, inside, strict=True)
    ]
    most_flops, most_weights = HEAVY_SHARE * sum(products), HEAVY_SHARE * sum(weights)
    marks = [index for index in range(len(main_path)) if products[index] > most_flops or weights[index] > most_weights]
    if len(marks) < 2:  # no two heavy nodes: cuts may lie between any nodes
        marks = list(range(len(main_path)))
    crossing = crossing_values(main_path, graph.reads.__getitem__)
    live = [sum(_size(costs, value) for value in values) for values in crossing]
    # A value that crosses a cut is declared in the rank graphs, so its type must be known.
    known = [
        index
        for index, (node, values) in enumerate(zip(main_path, crossing, strict=True))
        if all(value.dtype for value in values) and not _splits_slot(node, values)
    ]
    stuck = {value for node in main_path for value in node.outputs if value.dtype and why_not_passed(value) is not None}
    passed = [index for index in known if stuck.isdisjoint(crossing[index])]
    # If values of types that ranks can't pass on cross everywhere, the plan fails with a message that says so.
    return _gaps_between(marks, passed, live) or _gaps_between(marks, known, live)


def _gaps_between(marks: Sequence[int], possible: Collection[int], live: Sequence[int]) -> list[Gap]:
    """The narrowest of the `possible` places between each two consecutive marks, by the bytes that are `live` there."""
    gaps, possible = [], frozenset(possible)
    for before, after in itertools.pairwise(marks):
        if places := [index for index in range(before + 1, after + 1) if index in possible]:
            width = min(live[index] for index in places)
            level = [index for index in places if live[index] == width]
            gaps.append(Gap(level[0], level[-1], width))
    return gaps


def _splits_slot(node: ir.Node, crossing: Collection[ir.Value]) -> bool:
    """Whether a cut before a node goes through a slot, whose nodes do not exist in requests without adapters."""
    within = is_inside_slot(node) or is_slot_sum(node)
    return within or any(is_inside_slot(value.producer()) for value in crossing)


def _narrowest(gaps: Sequence[Gap], most: int) -> list[Gap]:
    """The `most` narrowest gaps. Of the widest among these, evenly spread ones are taken."""
    if len(gaps) <= most:
        return list(gaps)
    limit = sorted(gap.bytes for gap in gaps)[most - 1]
    narrower = [gap for gap in gaps if gap.bytes < limit]
    level = [gap for gap in gaps if gap.bytes == limit]
    count = most - len(narrower)
    return narrower + [level[(2 * number + 1) * len(level) // (2 * count)] for number in range(count)]


@dataclass(frozen=True)
class Repetition:
    """A choice of gaps that bound repeated blocks. `bounds` are indices of stretches.

    - `alike`: the number of blocks that are like the most common one. `covered`: the number of nodes in these.
    - `shared`: the number of nodes that all blocks together have in common with the most common one.
    - `crossing`: the bytes that cross the bounds.
    """

    bounds: tuple[int, ...]
    alike: int
    covered: int
    shared: int
    crossing: int


def _repeated_blocks(main_path: Sequence[ir.Node], gaps: Sequence[Gap]) -> list[Block]:
    """Prologue, repeated blocks and epilogue; an empty list if too little repeats (see REPEATED_SHARE).

    Only gaps up to a certain width may bound a block. That is the least width with which blocks cover nearly as much as
    with the best one (COVERED_SHARE), usually the width of the residual stream.
    """
    repetitions: list[tuple[Repetition, list[Gap]]] = []
    limit = 0.0
    for width in sorted({gap.bytes for gap in gaps}):
        if width > limit:
            limit = width * LEVEL
            narrow = [gap for gap in gaps if gap.bytes <= limit]
            if repetition := find_repetition(main_path, narrow):
                repetitions.append((repetition, narrow))
    if not repetitions:
        return []
    most = max(repetition.covered for repetition, _ in repetitions)
    repetition, narrow = next(option for option in repetitions if option[0].covered >= COVERED_SHARE * most)
    if repetition.shared < REPEATED_SHARE * len(main_path):
        return []
    # Cut at the last of equally narrow places: a norm stays with the addition before it, so that they can be fused.
    places = [0, *(gap.last for gap in narrow), len(main_path)]
    return _name_blocks(main_path, [places[bound] for bound in repetition.bounds])


def find_repetition(main_path: Sequence[ir.Node], gaps: Sequence[Gap]) -> Repetition | None:
    """The best bounds of repeated blocks; None if nothing repeats.

    The kind of a stretch is its sequence of operators. Each repeated kind is tried as the last stretch of a block (such
    as the feed-forward), and as the first.
    """
    places = [0, *(gap.first for gap in gaps), len(main_path)]
    stretches = [tuple(node.op_type for node in main_path[start:end]) for start, end in itertools.pairwise(places)]
    widths = [0, *(gap.bytes for gap in gaps), 0]
    repetitions = []
    for kind in (kind for kind, count in Counter(stretches).items() if count > 1):
        at = [index for index, other in enumerate(stretches) if other == kind]
        spacing = Counter(after - before for before, after in itertools.pairwise(at)).most_common(1)[0][0]
        # The first and the last block may differ from the others, and have no stretch of exactly this kind.
        starts = (at[0] - spacing, *at, at[-1] + spacing)
        for offset in (1, 0):
            bounds = tuple(start + offset for start in starts if 0 <= start + offset <= len(stretches))
            repetitions.append(_measure(bounds, stretches, widths))
    return max(
        (repetition for repetition in repetitions if repetition.alike > 1),
        key=lambda repetition: (repetition.alike, repetition.shared, -repetition.crossing),
        default=None,
    )


def _measure(bounds: tuple[int, ...], stretches: Sequence[tuple[str, ...]], widths: Sequence[int]) -> Repetition:
    """Measure how well blocks between `bounds` repeat, without blocks at the ends that differ from the others."""
    blocks = [tuple(itertools.chain(*stretches[start:end])) for start, end in itertools.pairwise(bounds)]
    kinds = Counter(blocks)
    common = Counter(kinds.most_common(1)[0][0])
    operators = {kind: Counter(kind) for kind in kinds}
    in_common = {kind: sum((common & own).values()) for kind, own in operators.items()}
    likenesses = {kind: in_common[kind] / sum((common | own).values()) for kind, own in operators.items()}
    shared, likeness = [in_common[block] for block in blocks], [likenesses[block] for block in blocks]
    kept = [index for index, like in enumerate(likeness) if like >= ALIKE_AT_ENDS]
    first, end = kept[0], kept[-1] + 1
    alike = [index for index in kept if likeness[index] >= ALIKE]
    covered = sum(len(blocks[index]) for index in alike)
    bounds = bounds[first : end + 1]
    return Repetition(bounds, len(alike), covered, sum(shared[first:end]), sum(widths[bound] for bound in bounds))


def _name_blocks(main_path: Sequence[ir.Node], cuts: Sequence[int]) -> list[Block]:
    """Blocks between cuts, named by the exporter's numbering ("layers.3") if there is one, else "block3"."""
    nodes = [tuple(main_path[start:end]) for start, end in itertools.pairwise(cuts)]
    names = _exporter_names(nodes) or [f"block{index}" for index in range(len(nodes))]
    blocks = [Block(name, "block", own) for name, own in zip(names, nodes, strict=True)]
    if cuts[0]:
        blocks.insert(0, Block("prologue", "prologue", tuple(main_path[: cuts[0]])))
    if cuts[-1] < len(main_path):
        blocks.append(Block("epilogue", "epilogue", tuple(main_path[cuts[-1] :])))
    return blocks


_NUMBERED = re.compile(r"(?<![A-Za-z0-9])([A-Za-z][A-Za-z_]*[._])(\d+)(?![A-Za-z0-9])")


def _exporter_names(blocks: Sequence[Sequence[ir.Node]]) -> list[str]:
    """For each block, the most common numbered name in its nodes' scopes: `layers.3` in `/model/layers.3/mlp/MatMul`.

    The list is empty unless the numbers count up by one: other numbers (`MatMul_31`) do not help a reader.
    """
    names: list[tuple[str, str]] = []
    for block in blocks:
        texts = (node.metadata_props.get("pkg.torch.onnx.name_scopes") or node.name or "" for node in block)
        counts = Counter((match[1], match[2]) for text in texts if (match := _NUMBERED.search(text)))
        names += [name for name, _ in counts.most_common(1)]
    numbers = [int(number) for _, number in names]
    prefixes = {prefix for prefix, _ in names}
    if len(names) < len(blocks) or len(prefixes) > 1 or numbers != [numbers[0] + i for i in range(len(numbers))]:
        return []
    return list(map("".join, names))


def _blocks_between(main_path: Sequence[ir.Node], gaps: Sequence[int]) -> list[Block]:
    bounds = [0, *gaps, len(main_path)]
    nodes = [tuple(main_path[start:end]) for start, end in itertools.pairwise(bounds) if start < end]
    return [Block(f"part{index}", "block", own) for index, own in enumerate(nodes)]
