"""Stacks of weights become the weights in them: else each layer would read its own by a Gather.

Layers that were written as a loop have the weights of all layers in one, along a first axis.
"""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.lazy_tensors import part_of_stack
from splitc.compiler.graphs.matching import constant_numbers, is_onnx, tensor_of
from splitc.compiler.graphs.optional import source_of


def split_stacks(graph: ir.Graph) -> None:
    """Replace weights that are read one part at a time, each at a fixed place of the first axis, in place."""
    editor = Editor(graph)
    for weight in list(graph.initializers.values()):
        readers = dict.fromkeys(node for node, _ in weight.uses())
        places = {node: place for node in readers if (place := _place(node, weight, graph)) is not None}
        if weight.is_graph_output() or source_of(weight) is not None or len(places) < len(readers):
            continue
        if len(set(places.values())) < 2 or any(node.outputs[0].is_graph_output() for node in places):
            continue  # one part is no stack; an output needs a node
        stack, parts = tensor_of(weight), dict[int, ir.Value]()
        for node, place in places.items():
            if place not in parts:
                parts[place] = editor.weight(part_of_stack(stack, place, f"{weight.name}.{place}"))
            node.outputs[0].replace_all_uses_with(parts[place])
            graph.remove(node, safe=True)
        del graph.initializers[weight.name or ""]


def _place(node: ir.Node, weight: ir.Value, graph: ir.Graph) -> int | None:
    """The place of a stack's first axis that a Gather of the graph picks; None for other nodes, and in branches."""
    if not is_onnx(node, "Gather") or node.graph is not graph or node.inputs[0] is not weight:
        return None
    shape, index = tensor_of(weight).shape.numpy(), node.inputs[1]
    numbers = constant_numbers(index)
    if index is None or numbers is None or tensor_of(index).shape.rank() or len(shape) < 2:
        return None
    if node.attributes.get_int("axis", 0) not in (0, -len(shape)):
        return None
    return numbers[0] % shape[0] if -shape[0] <= numbers[0] < shape[0] else None
