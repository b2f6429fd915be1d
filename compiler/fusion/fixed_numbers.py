"""Numbers that follow from sizes which no input changes, such as the square root of the size of a head.

Exporters that do not fold constants compute them from shapes. As constants, patterns can have them as factors.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.frontend.graph import Graph
from splitc.compiler.frontend.shapes import BoundShapes


def computed_numbers(graph: Graph, bound: BoundShapes) -> list[ir.Value]:
    """The numbers in floating point that the graph computes from sizes, and that others are computed from."""
    made = (node.outputs[0] for node in graph.nodes)
    numbers = dict.fromkeys(value for value in made if _is_number(value, bound))  # in order: constants are numbered
    return [value for value in numbers if not value.is_graph_output() and _is_read(value, numbers)]


def _is_number(value: ir.Value, bound: BoundShapes) -> bool:
    array = bound.constants.get(value.name or "")
    return array is not None and array.size == 1 and array.dtype.kind == "f"


def _is_read(value: ir.Value, numbers: Collection[ir.Value]) -> bool:
    return any(node.outputs[0] not in numbers for node, _ in value.uses())


def fix_numbers(editor: Editor, numbers: Collection[ir.Value], other: BoundShapes) -> bool:
    """Make those numbers constants that these shapes have too, in place. Returns whether there are any.

    Nodes that have no reader afterwards stay.
    """
    fixed = [value for value in numbers if value.name in other.constants]
    for value in fixed:
        value.replace_all_uses_with(editor.constant(other.constants[value.name or ""]))
    return bool(fixed)
