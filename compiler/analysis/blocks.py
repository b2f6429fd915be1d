"""Blocks: where a model may be cut, found from its structure.

1. Most of what a graph computes flows through its *spine*: all that is not free (`rematerialization`).
2. In the spine, written in an order in which few bytes are live, the *gaps* between heavy nodes are where it may be
   cut, each at the place where the fewest bytes cross.
3. The narrowest gaps make segments (attention parts, feed-forward parts), and segments that repeat make blocks.
   Where nothing repeats, every gap bounds a block of its own.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.analysis.costs import Costs
from splitc.compiler.analysis.liveness import Liveness, liveness
from splitc.compiler.analysis.rematerialization import find_free, find_shapes, find_upstream
from splitc.compiler.frontend.graph import Graph

# A node is heavy when it holds this share of the model's weights, or does this share of its products and convolutions.
# Cuts lie between heavy nodes.
HEAVY_SHARE = 1e-4
# Gaps are equally narrow when their live bytes differ by no more than this factor.
LEVEL = 1.25
# Blocks are alike when they have this share of their operators in common: the first and the last often differ a bit.
ALIKE = 0.75
ALIKE_AT_ENDS = 0.5
# A model is made of blocks that repeat when this share of its nodes is what they have in common.
REPEATED_SHARE = 2 / 3
# Blocks that the planner has to choose from, at most, where nothing repeats.
MOST_BLOCKS = 128


@dataclass(frozen=True)
class Block:
    """Consecutive nodes of the spine. `kind` is `prologue`, `block` or `epilogue`."""

    name: str
    kind: str
    nodes: tuple[ir.Node, ...]


@dataclass(frozen=True)
class Partition:
    """A graph's blocks in order, and the free nodes, which belong to no block.

    `finest` says that every gap bounds a block, rather than what repeats.
    `upstream` maps each node of a block to the free nodes that it stands on. `shapes` are the free Shape nodes whose
    sizes are all sizes of the model's inputs, so that they do not stand on what they read.
    """

    blocks: tuple[Block, ...]
    finest: bool
    free: frozenset[ir.Node]
    shapes: frozenset[ir.Node]
    upstream: Mapping[ir.Node, frozenset[ir.Node]]

    def with_free(self, block: Block) -> frozenset[ir.Node]:
        """The block's nodes and the free ones that it stands on."""
        return frozenset(block.nodes).union(*(self.upstream[node] for node in block.nodes))


def find_blocks(graph: Graph, costs: Costs, wanted: int = 1) -> Partition:
    """The graph's blocks: the repeated ones if there are any, or finer ones where those are fewer than `wanted`."""
    shapes = find_shapes(graph)
    free = find_free(graph, costs, shapes)
    if len(free) == len(graph.nodes):  # a model so cheap that all of it could be done twice
        free = shapes = frozenset()
    spine, live = order_spine(graph, costs, free)
    upstream = find_upstream(graph, free, shapes, spine)
    gaps = find_gaps(costs, spine, live, upstream)
    blocks = _repeated_blocks(spine, gaps)
    finest = len(blocks) < wanted or not blocks
    if finest:
        widest_last = sorted(gaps, key=lambda gap: gap.bytes)
        blocks = _plain_blocks(spine, sorted(gap.last for gap in widest_last[: MOST_BLOCKS - 1]))
    return Partition(tuple(blocks), finest, free, shapes, upstream)


def order_spine(graph: Graph, costs: Costs, free: frozenset[ir.Node]) -> tuple[list[ir.Node], Liveness]:
    """The nodes that are not free, in topological order, and what is live between them.

    The order is the file's, unless depth first far fewer bytes are live.

    Exporters write a model in the order in which it was run, and that is a good one. Some tools don't keep it.
    """
    as_written = [node for node in graph.nodes if node not in free]
    depth_first = _depth_first(graph, free)
    written, first = (_live(graph, costs, order) for order in (as_written, depth_first))
    return (depth_first, first) if 2 * sum(first.bytes) < sum(written.bytes) else (as_written, written)


def _live(graph: Graph, costs: Costs, spine: Sequence[ir.Node]) -> Liveness:
    # A value of unknown size counts as one byte, so that it is not taken for nothing.
    return liveness(spine, graph.reads.__getitem__, lambda value: max(1, costs.value_bytes(value)))


def _depth_first(graph: Graph, free: frozenset[ir.Node]) -> list[ir.Node]:
    """Post-order from the outputs: what a node reads comes right before it."""
    order: dict[ir.Node, None] = {}
    opened: set[ir.Node] = set()
    stack = [value.producer() for value in reversed(graph.graph.outputs)]
    while stack:
        node = stack[-1]
        if node is None or node in free or node in order:
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
    """The narrowest place between two heavy nodes: level from node `first` to node `last`, `bytes` wide."""

    first: int
    last: int
    bytes: int


def find_gaps(
    costs: Costs, spine: Sequence[ir.Node], live: Liveness, upstream: Mapping[ir.Node, frozenset[ir.Node]]
) -> list[Gap]:
    """The narrowest place between each two heavy nodes that follow each other."""
    products = [costs.flops(node) if costs.is_product(node) else 0 for node in spine]
    weights = [costs.weight_bytes([node, *upstream[node]]) for node in spine]
    most_flops, most_weights = HEAVY_SHARE * sum(products), HEAVY_SHARE * sum(weights)
    marks = [index for index in range(len(spine)) if products[index] > most_flops or weights[index] > most_weights]
    if len(marks) < 2:  # nothing but light nodes: any place is as good
        marks = list(range(len(spine)))
    gaps = []
    for before, after in itertools.pairwise(marks):
        # What crosses a cut is declared in a file, so its type must be known.
        typed = [i for i in range(before + 1, after + 1) if all(each.value.dtype for each in live.crossing[i])]
        if typed:
            width = min(live.bytes[index] for index in typed)
            level = [index for index in typed if live.bytes[index] == width]
            gaps.append(Gap(level[0], level[-1], width))
    return gaps


@dataclass(frozen=True)
class Repetition:
    """A choice of gaps between which blocks repeat. `bounds` are indices into the segments that the gaps make.

    `alike` is how many blocks are like the commonest one, `covered` how many nodes these hold, `shared` how many nodes
    all blocks have in common with it, and `crossing` the bytes cut through.
    """

    bounds: tuple[int, ...]
    alike: int
    covered: int
    shared: int
    crossing: int


def _repeated_blocks(spine: Sequence[ir.Node], gaps: Sequence[Gap]) -> list[Block]:
    """Prologue, repeated blocks and epilogue; nothing where too little repeats (see REPEATED_SHARE).

    Only narrow gaps may delimit a block. How narrow is not known beforehand, so the limit goes up until about as much
    of the spine repeats as ever will: at the width of the residual stream, as a rule.
    """
    found: list[tuple[Repetition, list[Gap]]] = []
    limit = 0.0
    for width in sorted({gap.bytes for gap in gaps}):
        if width > limit:
            limit = width * LEVEL
            narrow = [gap for gap in gaps if gap.bytes <= limit]
            if repetition := find_repetition(spine, narrow):
                found.append((repetition, narrow))
    most = max((repetition.covered for repetition, _ in found), default=0)
    if not found:
        return []
    repetition, narrow = next(each for each in found if each[0].covered >= 0.9 * most)
    if repetition.shared < REPEATED_SHARE * len(spine):
        return []
    # A cut goes to the end of a level stretch: a norm stays with the addition before it, as fusions want it.
    places = [0, *(gap.last for gap in narrow), len(spine)]
    return _name_blocks(spine, [places[bound] for bound in repetition.bounds])


def find_repetition(spine: Sequence[ir.Node], gaps: Sequence[Gap]) -> Repetition | None:
    """The best way to delimit blocks that repeat, or None where nothing does.

    Each kind of segment (its operators in order) that repeats is tried as the one that ends a block, as a feed-forward
    part does, and as the one that begins it.
    """
    places = [0, *(gap.first for gap in gaps), len(spine)]
    segments = [tuple(node.op_type for node in spine[start:end]) for start, end in itertools.pairwise(places)]
    options: list[tuple[int, ...]] = []
    for kind in (kind for kind, count in Counter(segments).items() if count > 1):
        at = [index for index, other in enumerate(segments) if other == kind]
        spacing = Counter(after - before for before, after in itertools.pairwise(at)).most_common(1)[0][0]
        # The first and the last block may be too unlike the others to hold a segment of just this kind.
        ending = (at[0] - spacing + 1, *(index + 1 for index in at), at[-1] + spacing + 1)
        beginning = (at[0] - spacing, *at, at[-1] + spacing)
        options += [tuple(bound for bound in each if 0 <= bound <= len(segments)) for each in (ending, beginning)]
    widths = [0, *(gap.bytes for gap in gaps), 0]
    repetitions = [_measure(bounds, segments, widths) for bounds in options]
    return max(
        (each for each in repetitions if each.alike > 1),
        key=lambda each: (each.alike, each.shared, -each.crossing),
        default=None,
    )


def _measure(bounds: tuple[int, ...], segments: Sequence[tuple[str, ...]], widths: Sequence[int]) -> Repetition:
    """How well blocks between `bounds` repeat. A block at either end that is not much like the others is left out."""
    blocks = [tuple(itertools.chain(*segments[start:end])) for start, end in itertools.pairwise(bounds)]
    operators = [Counter(block) for block in blocks]
    common = Counter(Counter(blocks).most_common(1)[0][0])
    shared = [sum((common & block).values()) for block in operators]
    likeness = [same / sum((common | block).values()) for same, block in zip(shared, operators, strict=True)]
    kept = [index for index, like in enumerate(likeness) if like >= ALIKE_AT_ENDS]
    first, end = kept[0], kept[-1] + 1
    alike = [index for index in kept if likeness[index] >= ALIKE]
    covered = sum(len(blocks[index]) for index in alike)
    bounds = bounds[first : end + 1]
    return Repetition(bounds, len(alike), covered, sum(shared[first:end]), sum(widths[bound] for bound in bounds))


def _name_blocks(spine: Sequence[ir.Node], cuts: Sequence[int]) -> list[Block]:
    """Blocks between cuts, named as the exporter numbered them ("layers.3") where it did, else "block3"."""
    parts = [tuple(spine[start:end]) for start, end in itertools.pairwise(cuts)]
    names = _exporter_names(parts) or [f"block{index}" for index in range(len(parts))]
    blocks = [Block(name, "block", part) for name, part in zip(names, parts, strict=True)]
    if cuts[0]:
        blocks.insert(0, Block("prologue", "prologue", tuple(spine[: cuts[0]])))
    if cuts[-1] < len(spine):
        blocks.append(Block("epilogue", "epilogue", tuple(spine[cuts[-1] :])))
    return blocks


_NUMBERED = re.compile(r"(?<![A-Za-z0-9])([A-Za-z][A-Za-z_]*[._])(\d+)(?![A-Za-z0-9])")


def _exporter_names(parts: Sequence[Sequence[ir.Node]]) -> list[str]:
    """The first numbered piece of most nodes' scopes or names in each part: `layers.3` of `/model/layers.3/mlp/MatMul`.

    Nothing unless they count up by one: other numbers (`MatMul_31`) say nothing to a reader.
    """
    found = []
    for part in parts:
        texts = (node.metadata_props.get("pkg.torch.onnx.name_scopes") or node.name or "" for node in part)
        pieces = Counter(match.groups() for text in texts if (match := _NUMBERED.search(text)))
        found += pieces.most_common(1)
    numbers = [int(number) for (_, number), _ in found]
    prefixes = {prefix for (prefix, _), _ in found}
    if len(found) < len(parts) or len(prefixes) > 1 or numbers != [numbers[0] + i for i in range(len(numbers))]:
        return []
    return ["".join(piece) for piece, _ in found]


def _plain_blocks(spine: Sequence[ir.Node], gaps: Sequence[int]) -> list[Block]:
    bounds = [0, *gaps, len(spine)]
    parts = [tuple(spine[start:end]) for start, end in itertools.pairwise(bounds) if start < end]
    return [Block(f"part{index}", "block", part) for index, part in enumerate(parts)]
