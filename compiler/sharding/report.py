"""Reports which of a model's weights are split, and why the others are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from splitc.compiler.adapters.slots import is_slot_input
from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.nodes import describe_node
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Factor, Pin
from splitc.compiler.operators.operation import Axes
from splitc.compiler.sharding.axis_map import AxisMap
from splitc.compiler.sharding.choice import Choice
from splitc.compiler.sharding.crossings import crossings
from splitc.compiler.sharding.products import Products
from splitc.compiler.sharding.sharded_model import ShardedModel
from splitc.runtime.units import format_bytes

# Warn if a smaller share of the blocks' weight bytes is split. A choice, for the warning alone.
WARN_BELOW_SHARE = 0.5


@dataclass(frozen=True)
class WeightSplit:
    """A weight: how many of its bytes are split over the ranks, and why the rest is whole.

    `units` has each rank's units of each sharded axis, such as "768,768".
    """

    name: str
    bytes: int
    split: int
    in_block: bool
    units: str
    reason: str | None

    @property
    def whole(self) -> int:
        """The bytes that are not split."""
        return self.bytes - self.split


def block_weights(analysis: Analysis) -> set[ir.Value]:
    """The weights that repeated blocks read."""
    return {
        weight
        for block in analysis.partition.blocks
        if block.kind == "block"
        for weight in analysis.costs.weights(analysis.partition.with_upstream(block))
    }


def warn_if_little_split(weights: Sequence[WeightSplit], where: str) -> list[str]:
    """A warning if little of the blocks' weights is split (WARN_BELOW_SHARE). `where` says where the rest is held."""
    inside = [weight for weight in weights if weight.in_block]
    held, divided = sum(weight.bytes for weight in inside), sum(weight.split for weight in inside)
    if divided >= WARN_BELOW_SHARE * held:
        return []
    return [
        f"only {divided / held:.0%} of the blocks' weights could be split ({format_bytes(divided)} of "
        f"{format_bytes(held)}): the rest is {where}"
    ]


def sharded_share(weights: Sequence[WeightSplit]) -> float:
    """The share of the weights' bytes that is split."""
    return sum(weight.split for weight in weights) / max(1, sum(weight.bytes for weight in weights))


def sharded_weights(analysis: Analysis, split: ShardedModel, choice: Choice) -> list[WeightSplit]:
    """The weights as tensor mode divides them."""
    uses = _uses(split.axis_map)
    readers = {value: node for node in reversed(analysis.graph.nodes) for value in analysis.graph.weights(node)}

    def outcome(value: ir.Value) -> _Outcome:
        if value not in uses:
            return 0.0, "", f"{describe_node(readers[value])} reads it in its subgraph"
        least = min(uses[value], key=partial(_split_share, split))  # equal weights of several nodes are one
        share = _split_share(split, least)
        reason = None if share == 1.0 else _why_all_whole(split, choice, least) or _why_no_axis(value)
        return share, _units(split, uses[value][0]), reason

    return _weight_splits(analysis, outcome)


def sliced_weights(analysis: Analysis, products: Products, columns: ShardedModel) -> list[WeightSplit]:
    """The weights as row mode divides them by `columns`."""
    uses = _uses(products.axis_map)
    sliced = {product.node for product in products.sliceable if product.columns in columns.ranges}

    def outcome(value: ir.Value) -> _Outcome:
        others = [node for node in products.readers[value] if node not in sliced]
        share = 0.0 if others else min(_split_share(columns, axes) for axes in uses[value])
        units = _units(columns, uses[value][0]) if share else ""
        return share, units, None if share == 1.0 else _why_not_sliced(products, others)

    return _weight_splits(analysis, outcome)


# The share of a weight that is split, each rank's units, and why the rest is whole.
_Outcome = tuple[float, str, str | None]


def _weight_splits(analysis: Analysis, outcome: Callable[[ir.Value], _Outcome]) -> list[WeightSplit]:
    """All weights of the model, in the order in which they are read, without slots for adapters."""
    inside = block_weights(analysis)
    splits = []
    for value in (value for value in analysis.costs.weights(analysis.graph.nodes) if not is_slot_input(value)):
        size, (share, units, reason) = analysis.costs.value_bytes(value), outcome(value)
        splits.append(WeightSplit(value.name or "", size, int(size * share), value in inside, units, reason))
    return splits


def _uses(axis_map: AxisMap) -> dict[ir.Value, list[Axes]]:
    """The axes of each weight at each of its uses."""
    uses: dict[ir.Value, list[Axes]] = {}
    for value, axes in axis_map.weight_uses():
        uses.setdefault(value, []).append(axes)
    return uses


def _why_not_sliced(products: Products, others: Sequence[ir.Node]) -> str:
    """Why the nodes that read a weight at run time leave it whole."""
    reasons = [products.declined[node].reason for node in others if node in products.declined]
    if others:
        return reasons[0] if reasons else "the shares leave all its columns to the main device"
    return "no product slices its columns"


def _units(split: ShardedModel, axes: Axes) -> str:
    """Each rank's units of each axis that is cut."""
    atoms = [atom for axis in axes or () for atom in dict.fromkeys(ax.atoms(axis))]
    return "; ".join(
        ",".join(str(part.size if part.owned else 0) for part in split.ranges[atom])
        for atom in atoms
        if atom in split.ranges
    )


def _why_no_axis(value: ir.Value) -> str:
    is_number = value.const_value is not None and value.const_value.size == 1
    return "it is a single number" if is_number else "it has no axis of known size"


def _why_all_whole(split: ShardedModel, choice: Choice, axes: Axes) -> str:
    """Why atoms of a weight are not split. Those that one node needs whole for one reason are listed together."""
    atoms = dict.fromkeys(ax.atoms_of(axes))
    needed: dict[Pin, dict[int, None]] = {}
    for atom in atoms:
        if atom.pinned is not None:
            needed.setdefault(atom.pinned, {})[atom.size] = None

    def why(atom: Factor) -> str | None:
        if atom.pinned is None or atom in split.ranges:
            return why_whole(split, choice, atom)
        return _needs(atom.pinned, ", ".join(map(str, needed[atom.pinned])))

    return "; ".join(dict.fromkeys(text for text in map(why, atoms) if text))


def _needs(pin: Pin, sizes: str) -> str:
    """The message that a node needs axes of these sizes whole."""
    why = f" ({pin.reason})" if pin.reason else ""
    axes = f"{'axes' if ',' in sizes else 'axis'} of {sizes}"
    return f"{axes}: {pin.reason}" if pin.node is None else f"{describe_node(pin.node)} needs the {axes} whole{why}"


def _split_share(split: ShardedModel, axes: Axes) -> float:
    """The share of a weight's elements that is sharded rather than replicated."""
    return max((_axis_share(split, axis) for axis in axes or ()), default=0.0)


def _axis_share(split: ShardedModel, axis: ax.Axis) -> float:
    leaves = ax.leaves(axis)
    if any(leaf in split.ranges for leaf in leaves):
        return 1.0
    return max(
        (
            sum(_axis_share(split, section) * ax.size_of(section) for section in leaf.sections) / max(1, leaf.size)
            for leaf in leaves
            if not leaf.is_atom
        ),
        default=0.0,
    )


def why_whole(split: ShardedModel, choice: Choice, atom: Factor) -> str | None:
    """Why an atom is not split, as a message; None if it is split."""
    if atom in split.ranges:
        return None
    if atom.pinned is not None:
        return _needs(atom.pinned, str(atom.size))
    return f"axis of {atom.size}: {choice.rejected.get(atom) or 'splitting it would save too little'}"


@dataclass(frozen=True)
class AxisSplit:
    """An axis of weights.

    - `size`: its size. `weights` and `bytes`: the number and the bytes of the weights that have it. `first`: the name
      of the first of these.
    - `sums`: the number of collectives that splitting it takes; None if it is no candidate.
    - `units`: each rank's units if it is sharded. If not, `reason` says why.
    - `joined`: its shards are joined where they leave an island.
    """

    size: int
    weights: int
    bytes: int
    sums: int | None
    units: tuple[int, ...]
    reason: str | None
    joined: bool
    first: str


def axis_splits(analysis: Analysis, split: ShardedModel, choice: Choice) -> list[AxisSplit]:
    """The axes of weights, the one that divides the most bytes first."""
    reached: dict[Factor, dict[ir.Value, None]] = {}
    for value, axes in split.axis_map.weight_uses():
        for atom in ax.atoms_of(axes):
            reached.setdefault(atom, {})[value] = None
    sums = {candidate.atom: candidate.collectives for candidate in choice.candidates}
    sides = (side for crossing in crossings(split.axis_map) for side in crossing.sides)
    joined = {atom for side in sides for atom in ax.atoms(side.before)}
    splits = [
        AxisSplit(
            atom.size,
            len(weights),
            sum(map(analysis.costs.value_bytes, weights)),
            sums.get(atom),
            tuple(part.size if part.owned else 0 for part in split.ranges.get(atom, ())),
            why_whole(split, choice, atom),
            atom in joined,
            next(iter(weights)).name or "",
        )
        for atom, weights in reached.items()
    ]
    return sorted(splits, key=lambda axis: -axis.bytes)
