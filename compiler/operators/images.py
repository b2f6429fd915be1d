"""Operators on images: depth to space and back, sampling at given positions, patches as columns."""

from __future__ import annotations

from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.operation import LINEAR, Operation
from splitc.compiler.operators.operator import Operator


def depth_to_space(op: Operation) -> None:
    """Channels are block x block x the rest. The rest comes first in mode CRD and last in mode DCR."""
    channels = "c a b" if op.node.attributes.get_string("mode", "DCR") == "CRD" else "a b c"
    _blocks(op, f"n ({channels}) h w -> n c (h a) (w b)")


def space_to_depth(op: Operation) -> None:
    _blocks(op, "n c (h a) (w b) -> n (a b c) h w")


def _blocks(op: Operation, pattern: str) -> None:
    block = ax.new_axis(op.number("blocksize", 1))
    other = ax.new_axis(ax.size_of(block))
    op.pattern(pattern, whole="ab", known={"a": block, "b": other})
    op.linear = LINEAR


def grid_sample(op: Operation) -> None:
    """Each image's channels are sampled at the positions of the image's grid."""
    image, grid, output = op.input(0), op.input(1), op.output()
    op.relate_all(image[:2], output[:2])
    op.relate(grid[0], output[0])
    op.relate_all(grid[1:-1], output[2:])
    op.linear = LINEAR


def columns_to_image(op: Operation) -> None:
    """Patches, given as columns [channels x positions in a patch], are summed into an image."""
    columns, output = op.input(0), op.output()
    patch = ax.new_axis(ax.size_of(columns[1]) // max(1, ax.size_of(output[1])))
    op.relate(columns[0], output[0])
    op.relate(columns[1], (*output[1], *patch))
    op.whole([patch])
    op.linear = LINEAR


OPERATORS = (
    Operator("DepthToSpace", depth_to_space),
    Operator("SpaceToDepth", space_to_depth),
    Operator("GridSample", grid_sample),
    Operator("Col2Im", columns_to_image),
)
