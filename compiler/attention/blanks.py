"""Finds a Where that sets entirely masked rows to zero after attention, as transformers' exporter writes it.

The Where stands between the product with the values and the Transpose that merges the heads, so that this Transpose
could not be fused. Fusion moves the Where behind the operator.
"""

from __future__ import annotations

from dataclasses import replace

from splitc.compiler.attention.attention import Attention, Blanks
from splitc.compiler.graphs.matching import constant, is_onnx, readers_of
from splitc.compiler.patterns.sizes import ONE, Sizes


def with_blanks(attention: Attention, sizes: Sizes) -> Attention:
    """The attention with its `blanks`; unchanged if no Where sets rows of its output to zero."""
    output, rank = attention.output, len(attention.order)
    readers = readers_of(output)
    if attention.blanks is not None:
        return attention
    if len(readers) != 1 or output.is_graph_output() or attention.is_flat or attention.order != (0, 1, 2, 3)[:rank]:
        return attention
    where = readers[0]
    if not is_onnx(where, "Where") or where.inputs[2] is not output or constant(where.inputs[1]) != 0.0:
        return attention
    rows = where.inputs[0]
    own, made = None if rows is None else sizes.of(rows), sizes.of(output)
    if rows is None or own is None or made is None or len(own) != 4 or len(made) != 4:
        return attention
    fits = own[1] == own[3] == ONE and own[0] in (ONE, made[0]) and own[2] == made[2]
    if not fits or sizes.of(where.outputs[0]) != made:
        return attention
    return replace(attention, blanks=Blanks(rows, where.outputs[0]), passed=(*attention.passed, output))
