"""Lookups of parts of a list, in a loop, become one lookup before the loop, of whose rows its iterations take parts.

TorchScript writes an EmbeddingBag as a loop over its bags. A weight that a subgraph reads is whole on a device, and
nothing is cut there, so a model of such tables could not be split.
"""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.matching import constant_numbers, is_onnx, made_by


def look_up_before_loops(graph: ir.Graph) -> None:
    """Replace the lookups of slices in the loops of a model's main graph, in place."""
    for loop in [node for node in graph if is_onnx(node, "Loop")]:
        body = loop.attributes["body"].as_graph()
        for node in [node for node in body if is_onnx(node, "Gather") and not node.attributes.get_int("axis", 0)]:
            table, part = node.inputs[0], made_by(node.inputs[1], "Slice")
            if part is None or part.graph is not body or len(part.inputs) < 4:
                continue
            listed, axes = part.inputs[0], constant_numbers(part.inputs[3])
            is_outside = listed is not None and listed.graph is graph
            # Rows are sliced as their numbers, along an axis that is counted from the front: they have more behind it.
            if table is not None and table.is_initializer() and is_outside and axes == [0]:
                rows = Editor(graph).before(loop, "Gather", table, listed, dtype=table.dtype)
                Editor(body).replace(node, ir.Node("", "Slice", [rows, *part.inputs[1:]], name=node.name))
