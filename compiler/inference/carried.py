"""States of loops whose sizes change from one iteration to the next: their sizes are unknown.

A body's inputs have the sizes with which its states begin, by inference or as torch's exporter declares them. So a list
of tokens that begins empty would have one token in all iterations, and behind the loop.
"""

from __future__ import annotations

import re

import onnx_ir as ir

from splitc.compiler.graphs.matching import is_onnx
from splitc.compiler.graphs.reads import all_nodes
from splitc.compiler.inference.iterations import GOES_ON, LEADING

# Symbols that onnx-shape-inference generates for unknown sizes.
MADE_UP = re.compile(r"_d\d+")


def free_changing_states(graph: ir.Graph) -> bool:
    """Make sizes of states unknown that differ after an iteration, in place, by the inferred shapes of bodies.

    So are numbers that a body declares where the size with which the state begins is another one, or has a symbol.
    Returns whether there are any that were known. Then shapes have to be inferred again, which may free others.
    """
    is_changed = False
    for loop in [node for node in all_nodes(graph) if is_onnx(node, "Loop")]:
        body = loop.attributes["body"].as_graph()
        for place in range(len(loop.inputs) - LEADING):
            state, after = body.inputs[LEADING + place], body.outputs[GOES_ON + place].shape
            if state.shape is None or after is None or len(after) != len(state.shape):
                continue
            begin = loop.inputs[LEADING + place]
            known = None if begin is None else begin.shape
            first = state.shape if known is None or len(known) != len(after) else known
            sizes = [
                own if is_made_up(own) or (own == new and not _contradicts(own, size)) else None
                for own, new, size in zip(state.shape, after, first, strict=True)
            ]
            if None in sizes:
                state.shape, is_changed = ir.Shape(sizes), True
    return is_changed


def _contradicts(own: int | ir.SymbolicDim, first: int | ir.SymbolicDim) -> bool:
    return isinstance(own, int) and own != first and not is_made_up(first)


def forget_inferred(graph: ir.Graph) -> None:
    """Drop all shapes and constants that inference has set, in place."""
    for node in all_nodes(graph):
        for value in node.outputs:
            value.shape = value.const_value = None
        for value in node.attributes["body"].as_graph().inputs if is_onnx(node, "Loop") else ():
            if value.shape is not None:
                value.shape = ir.Shape([None if is_made_up(size) else size for size in value.shape])


def is_made_up(size: int | ir.SymbolicDim) -> bool:
    """Whether a size is unknown: it has no symbol, or one that inference generated."""
    return isinstance(size, ir.SymbolicDim) and (size.value is None or MADE_UP.fullmatch(size.value) is not None)
