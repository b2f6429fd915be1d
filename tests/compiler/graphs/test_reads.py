"""What nodes read, and the graphs in them."""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.graphs.reads import has_subgraphs


def test_branches_without_nodes_are_subgraphs() -> None:
    """Their outputs are constants."""
    branches = {f"{way}_branch": ir.Graph([], [], nodes=[], name=way) for way in ("then", "else")}
    for branched in (True, False):
        value = ir.Value(name="value")
        node = ir.node("If", [value], branches) if branched else ir.node("Not", [value])
        assert has_subgraphs(ir.Graph([value], [], nodes=[node])) == branched
