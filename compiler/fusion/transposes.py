"""Moves a Transpose behind what cuts its result, so that the operators that read the parts may take them without it."""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.frontend.matching import made_by
from splitc.compiler.fusion.operand import Operand, seen_through, whole
from splitc.compiler.fusion.sizes import Sizes
from splitc.compiler.fusion.writing import Writer
from splitc.compiler.nodes import settings_of


def behind_split(value: ir.Value, editor: Editor, sizes: Sizes) -> ir.Value:
    """A part of a Split, with the Transpose before that moved behind it, in place; any other value as it is."""
    node, own = made_by(value, "Split"), sizes.axes(value)
    source = None if node is None else node.inputs[0]
    if node is None or source is None or own is None or len(source.uses()) > 1 or source.is_graph_output():
        return value
    seen = seen_through(whole(source, len(own)), scaled=False)
    axes = [sizes.axes(part) for part in node.outputs]
    if seen.is_value or sizes.axes(seen.value) is None or None in axes:
        return value
    how = {**settings_of(node), "axis": seen.axes[node.attributes.get_int("axis", 0)]}
    split = ir.node("Split", [seen.value, *node.inputs[1:]], how, num_outputs=len(node.outputs))
    work = Writer(node, value.name or "", (), editor, sizes)
    work.insert(split)
    turned = []
    for part, new, part_axes in zip(node.outputs, split.outputs, axes, strict=True):
        assert part_axes is not None
        work.name_value(new, "part", part, [part_axes[seen.axes.index(n)] for n in range(len(own))])
        turned.append(work.ordered(Operand(new, seen.axes), "part_turned"))
        work.take_place(turned[-1], part)
    return turned[node.outputs.index(value)]
