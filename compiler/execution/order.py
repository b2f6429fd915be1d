"""The order in which ONNX Runtime runs a graph's nodes."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import onnx_ir as ir

from splitc.compiler.execution.liveness import Nodes, Reads
from splitc.compiler.execution.patterns import GELUS, biased_products
from splitc.compiler.graphs.matching import is_onnx, made_by
from splitc.compiler.nodes import inputs_of

_ENDS_GELU = (*GELUS, "Mul")


def execution_order(nodes: Sequence[ir.Node], reads: Reads) -> list[ir.Node]:
    """The nodes of a file in the order in which ONNX Runtime runs them.

    Nodes that its optimizer creates are appended to the graph, pass by pass. Their position decides which branch runs
    first where two read one value: a block's MLP or its attention, queries or values.
    """
    both = Nodes(nodes, reads)
    return depth_first(nodes, reads, positions_after_passes(both, biased_products(both)))


def positions_after_passes(
    nodes: Nodes, biased: Mapping[ir.Node, ir.Node], *later: Container[ir.Node]
) -> dict[ir.Node, int]:
    """Each node's position in ONNX Runtime's graph; see `execution_order`.

    Later passes append the `later` nodes, after those that become a Gemm or a Gelu.
    """
    order = nodes.order
    position = {node: number for number, node in enumerate(order)}
    passes = (biased.__contains__, _follows_view, lambda node: ends_gelu(node, biased))
    for is_made in (*passes, *(made.__contains__ for made in later)):
        if any(map(is_made, order)):
            made = [node for node in depth_first(order, nodes.reads, position) if is_made(node)]
            position.update((node, len(order) + number) for number, node in enumerate(made, max(position.values())))
    return position


def depth_first(nodes: Sequence[ir.Node], reads: Reads, position: Mapping[ir.Node, int]) -> list[ir.Node]:
    """The nodes by depth-first search from the graph's ends to its inputs, starting with the file's last node.

    It is the order of Graph::ReverseDFSFrom (core/graph/graph.cc), which differs from the file's.
    """
    above = {node: _producers(node, reads, position) for node in nodes}
    read = {maker for makers in above.values() for maker in makers}
    stack = [(node, False) for node in sorted(nodes, key=position.__getitem__) if node not in read]
    seen: set[ir.Node] = set()
    order = []
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(maker, False) for maker in above[node] if maker not in seen]
    return order


def _follows_view(node: ir.Node) -> bool:
    """Whether ONNX Runtime merges a Reshape with the one before it."""
    return is_onnx(node, "Reshape") and made_by(node.inputs[0], "Reshape") is not None


def _producers(node: ir.Node, reads: Reads, position: Mapping[ir.Node, int]) -> list[ir.Node]:
    makers = {maker for value in reads(node) if (maker := value.producer()) in position and maker is not None}
    return sorted(makers, key=position.__getitem__)


def ends_gelu(node: ir.Node, biased: Container[ir.Node]) -> bool:
    """Whether a node is the last of a Gelu that is fused from several nodes, or fused with the bias before it.

    A bias in `biased` is fused into a product instead.
    """
    above = [value.producer() for value in inputs_of(node)] if node.op_type in _ENDS_GELU else []
    if node.op_type in GELUS:
        return any(maker is not None and maker.op_type == "Add" and maker not in biased for maker in above)
    return any(_reads_erf(maker, 2) for maker in above if maker is not None)


def _reads_erf(node: ir.Node, steps: int) -> bool:
    if node.op_type == "Erf":
        return True
    makers = (value.producer() for value in inputs_of(node)) if node.op_type in ("Add", "Mul") else ()
    return steps > 0 and any(_reads_erf(maker, steps - 1) for maker in makers if maker is not None)
