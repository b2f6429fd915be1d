"""Makes scalars constants that are computed from fixed sizes, such as the square root of the head size.

Exporters that do not fold constants compute them by Shape, Gather and so on. Patterns expect constant factors.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.frontend.graph import Graph
from splitc.compiler.frontend.shapes import BoundShapes


def computed_numbers(graph: Graph, bound: BoundShapes) -> list[ir.Value]:
    """The floating-point scalars that the graph computes from sizes, without those only used to compute others."""
    made = (node.outputs[0] for node in graph.nodes)
    numbers = dict.fromkeys(value for value in made if _is_number(value, bound))  # in order: constants are numbered
    return [value for value in numbers if not value.is_graph_output() and _is_read(value, numbers)]


def _is_number(value: ir.Value, bound: BoundShapes) -> bool:
    array = bound.constants.get(value.name or "")
    return array is not None and array.size == 1 and array.dtype.kind == "f"


def _is_read(value: ir.Value, numbers: Collection[ir.Value]) -> bool:
    return any(node.outputs[0] not in numbers for node, _ in value.uses())


def fix_numbers(editor: Editor, numbers: Collection[ir.Value], other: BoundShapes) -> bool:
    """Make numbers constants, in place, that the `other` shapes fix too. Returns whether there are any.

    Nodes that nothing reads afterwards stay in the graph.
    """
    fixed = [value for value in numbers if value.name in other.constants]
    for value in fixed:
        value.replace_all_uses_with(editor.constant(other.constants[value.name or ""]))
    return bool(fixed)
