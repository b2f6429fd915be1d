"""What of a model's weights is split, and why the rest is not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import onnx_ir as ir

from splitc.compiler.analysis import Analysis
from splitc.compiler.graph import describe_node
from splitc.compiler.split import axes as ax
from splitc.compiler.split.axes import Factor
from splitc.compiler.split.operation import Axes
from splitc.compiler.split.tensor import TensorSplit


@dataclass(frozen=True)
class SplitWeight:
    """A weight: of its bytes those that are split over the ranks, and why the rest is whole.

    `units` says how it is cut: for each axis that is, how many units each rank has.
    """

    name: str
    bytes: int
    split: int
    in_block: bool
    units: str
    reason: Optional[str]


def split_weights(analysis: Analysis, split: TensorSplit) -> list[SplitWeight]:
    """All weights of the model, in the order in which they are read."""
    inside = {
        weight
        for block in analysis.partition.blocks
        if block.kind == "block"
        for weight in analysis.costs.weights(analysis.partition.with_free(block))
    }
    uses: dict[ir.Value, list[Axes]] = {}
    for value, axes in split.axis_map.weight_uses():
        uses.setdefault(value, []).append(axes)
    return [_describe(analysis, split, value, axes, value in inside) for value, axes in uses.items()]


def _describe(analysis: Analysis, split: TensorSplit, value: ir.Value, uses: list[Axes], in_block: bool) -> SplitWeight:
    size = analysis.costs.value_bytes(value)
    share = min(_split_share(split, axes) for axes in uses)
    atoms = [atom for axis in uses[0] or () for atom in dict.fromkeys(ax.atoms(axis))]
    units = "; ".join(
        ",".join(str(each.size if each.counts else 0) for each in split.ranges[atom])
        for atom in atoms
        if atom in split.ranges
    )
    reasons = dict.fromkeys(why for atom in atoms if (why := why_whole(split, atom)))
    reason = None if share == 1.0 else "; ".join(reasons) or "it has no axis of known size"
    return SplitWeight(value.name or "", size, int(size * share), in_block, units, reason)


def _split_share(split: TensorSplit, axes: Axes) -> float:
    """The share of a weight's elements that is cut, and not the same on all ranks."""
    found = 0.0
    for axis in axes or ():
        found = max(found, _axis_share(split, axis))
    return found


def _axis_share(split: TensorSplit, axis: ax.Axis) -> float:
    leaves = ax.leaves(axis)
    if any(leaf in split.ranges for leaf in leaves):
        return 1.0
    return max(
        (
            sum(_axis_share(split, each) * ax.size_of(each) for each in leaf.sections) / max(1, leaf.size)
            for leaf in leaves
            if not leaf.is_atom
        ),
        default=0.0,
    )


def why_whole(split: TensorSplit, atom: Factor) -> Optional[str]:
    """Why an atom is not split, for people."""
    if atom in split.ranges:
        return None
    if atom.pinned is not None:
        node, why = atom.pinned.node, atom.pinned.reason
        if node is None:
            return f"{atom.size}: {why}"
        return f"{describe_node(node)} ({node.op_type}) needs {atom.size} whole" + (f" ({why})" if why else "")
    reason = split.choice.rejected.get(atom)
    return f"{atom.size}: {reason}" if reason else f"{atom.size}: too little to gain"
