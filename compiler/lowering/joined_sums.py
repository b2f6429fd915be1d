"""Merges the all-reduces of two norms, such as those of queries and of keys, into one.

They sum one or two numbers per token. So they cost the latency of a collective, not its traffic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.frontend.reads import node_reads
from splitc.compiler.frontend.walks import ancestors, producer_of
from splitc.compiler.nodes import settings_of


def join_sums(editor: Editor, one: ir.Value, other: ir.Value, counts: Sequence[int]) -> None:
    """Replace the all-reduces of two norms' sums, [..., 1] or [..., 2], by one. `other` is computed later than `one`.

    `counts` are their numbers of sums for each row. Nodes between them that the later one needs move before both.
    """
    graph, first, second = editor.graph, producer_of(one), producer_of(other)
    nodes, needed = list(graph), ancestors([second], node_reads)
    for node in nodes[nodes.index(first) + 1 : nodes.index(second)]:
        if node in needed:
            graph.remove(node)
            graph.insert_before(first, node)
    partial = editor.before(first, "Concat", first.inputs[0], second.inputs[0], axis=-1)
    whole = editor.before(first, first.op_type, partial, **settings_of(first))
    partial.type = whole.type = one.type
    # These names must be the same on all ranks.
    partial.name, whole.name = (f"{one.name}+{other.name}{end}" for end in ("/part", ""))
    for old, own in zip((one, other), np.split(np.arange(sum(counts)), counts[:1]), strict=True):
        new = editor.before(first, "Gather", whole, editor.constant(own), axis=-1)
        new.type, new.shape = old.type, old.shape
        old.replace_all_uses_with(new)
    graph.remove([first, second], safe=True)
