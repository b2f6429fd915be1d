"""Weights of both directions of a recurrent network become one weight, as its operator has them.

torch's newer exporter orders their gates and joins them in the graph. No rank could have those of one direction alone.
"""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.graphs.alone import run_alone, with_own_tensors
from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.matching import is_onnx
from splitc.compiler.graphs.reads import view_of
from splitc.compiler.graphs.walks import ancestors, producers
from splitc.compiler.inference.symbolic import shapes_by_onnx
from splitc.compiler.nodes import inputs_of, known_weight

RECURRENT = ("LSTM", "GRU", "RNN")
# A recurrent node's inputs that are weights: of data, of states, biases.
WEIGHTS = (1, 2, 3)
# The types that ONNX Runtime's recurrent operators have.
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)
# Operators that only move elements.
MOVING = ("Concat", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze")


def join_directions(graph: ir.Graph) -> None:
    """Replace what recurrent nodes of two directions read by weights, where it is made of weights alone, in place."""
    editor = Editor(graph)
    for node in [node for node in graph if is_onnx(node, *RECURRENT)]:
        if node.attributes.get_string("direction", "forward") == "bidirectional":
            for place in WEIGHTS:
                if place < len(node.inputs) and (value := node.inputs[place]) is not None:
                    _join(value, node, editor)


def _join(value: ir.Value, reader: ir.Node, editor: Editor) -> None:
    """Let a node read a lazy weight in place of a value that moves elements of weights which nothing else reads."""
    graph = editor.graph
    needed = ancestors(producers([value]), inputs_of)
    nodes = [node for node in graph if node in needed]
    made = {output for node in nodes for output in node.outputs}
    weights = {one: known_weight(one) for node in nodes for one in inputs_of(node) if one not in made}
    moved = {one: tensor.dtype for one, tensor in weights.items() if tensor is not None and tensor.dtype in FLOATS}
    if None in weights.values() or not moved or not all(is_onnx(node, *MOVING) for node in nodes):
        return
    users = {use.node for one in (*made, *moved) for use in one.uses()}
    if not users <= {*nodes, reader} or any(one.is_graph_output() for one in (*made, *moved)):
        return
    part, dtype = view_of(graph, [], [value], nodes).clone(), next(iter(moved.values()))
    shape = shapes_by_onnx(ir.Model(part, ir_version=10)).get(value.name)
    if shape is None or not shape.is_static():
        return

    def read() -> ir.TensorProtocol:
        return ir.Tensor(run_alone(with_own_tensors(part), {})[0], dtype)

    lazy = ir.LazyTensor(read, dtype, ir.Shape(shape.numpy()), name=value.name)
    value.name = None
    value.replace_all_uses_with(editor.weight(lazy))
    for node in reversed(nodes):
        graph.remove(node, safe=True)
