"""Remove what nobody reads. What only a removed node's subgraphs read is read by nobody."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as passes

from splitc.compiler.frontend.reads import has_subgraphs, node_reads, subgraphs


def remove_unused(graph: ir.Graph) -> None:
    """Remove the nodes, the weights and the optional outputs that no output of the graph needs, in place."""
    if has_subgraphs(graph):
        wanted = set(graph.outputs)
        for node in reversed(graph):
            if wanted.isdisjoint(node.outputs):
                let_go(node)
            else:
                wanted.update(node_reads(node))
    passes.RemoveUnusedNodesPass()(ir.Model(graph, ir_version=10))


def remove_unused_inputs(graph: ir.Graph) -> None:
    """Remove the graph's inputs that nothing reads, in place."""
    for value in [value for value in graph.inputs if not value.uses() and not value.is_graph_output()]:
        graph.inputs.remove(value)


def let_go(node: ir.Node) -> None:
    """Disconnect the nodes inside a node from the values that they read."""
    for graph in subgraphs(node):
        for inner in ir.traversal.RecursiveGraphIterator(graph):
            for number in range(len(inner.inputs)):
                inner.replace_input_with(number, None)
        graph.outputs.clear()
