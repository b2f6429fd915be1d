"""Removes unread nodes, weights and inputs. What only subgraphs of removed nodes read counts as unread."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir
import onnx_ir.passes.common as passes

from splitc.compiler.graphs.reads import has_subgraphs, node_reads, subgraphs


def remove_unused(graph: ir.Graph) -> None:
    """Remove the nodes, the weights and the optional outputs that no output of the graph needs, in place."""
    if has_subgraphs(graph):
        wanted = set(graph.outputs)
        for node in reversed(graph):
            if wanted.isdisjoint(node.outputs):
                disconnect_subgraphs(node)
            else:
                wanted.update(node_reads(node))
    passes.RemoveUnusedNodesPass()(ir.Model(graph, ir_version=10))


def remove_unused_inputs(graph: ir.Graph, among: Collection[ir.Value] | None = None) -> list[ir.Value]:
    """Remove the graph's unread inputs, or those `among` some values, in place. Returns the removed ones."""
    candidates = graph.inputs if among is None else among
    unused = [v for v in candidates if v.is_graph_input() and not v.uses() and not v.is_graph_output()]
    for value in unused:
        graph.inputs.remove(value)
    return unused


def disconnect_subgraphs(node: ir.Node) -> None:
    """Disconnect the nodes in a node's subgraphs from the values that they read."""
    for graph in subgraphs(node):
        for inner in ir.traversal.RecursiveGraphIterator(graph):
            for number in range(len(inner.inputs)):
                inner.replace_input_with(number, None)
        graph.outputs.clear()
