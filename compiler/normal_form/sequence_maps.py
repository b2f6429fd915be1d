"""Replaces SequenceMap over known parts by copies of its body: weights in it are sharded, shapes behind it known."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.matching import is_onnx
from splitc.compiler.graphs.unused import disconnect_subgraphs
from splitc.compiler.inference.symbolic import Shapes, shapes_by_onnx
from splitc.compiler.nodes import inputs_of
from splitc.compiler.normal_form.loops import NODES, Repeated
from splitc.compiler.normal_form.sequences import parts_of


def unroll_maps(model: ir.Model) -> None:
    """Replace each SequenceMap of the main graph whose sequences' parts are known, in place."""
    maps = [node for node in model.graph if is_onnx(node, "SequenceMap")]
    if not maps:
        return
    shapes, left = shapes_by_onnx(model), NODES
    editor = Editor(model.graph)
    for node in maps:
        given = _given(node, editor, shapes)
        repeated = Repeated(node, len(given), (), (), editor)
        if given and repeated.nodes <= left and not any(value.is_graph_output() for value in node.outputs):
            left -= repeated.nodes
            _unroll(repeated, given)


def _given(node: ir.Node, editor: Editor, shapes: Shapes) -> list[list[ir.Value]]:
    """What each copy of a SequenceMap's body reads; nothing if that is not known.

    Beside its first input, others may be sequences of as many parts, or one value for all copies.
    """
    read = inputs_of(node)
    parts = [parts_of(value, editor, shapes) for value in read]
    count = len(parts[0])
    for number, value in enumerate(read):
        if isinstance(value.type, ir.TensorType):
            parts[number] = [value] * count
    return [list(one) for one in zip(*parts, strict=True)] if {len(one) for one in parts} == {count} else []


def _unroll(repeated: Repeated, given: Sequence[list[ir.Value]]) -> None:
    """Put copies of a SequenceMap's body in its place, and sequences of their results."""
    node, editor = repeated.node, repeated.editor
    results = [repeated.copy(values, number)[1] for number, values in enumerate(given)]
    for old, *made in zip(node.outputs, *results, strict=True):
        new = editor.before(node, "SequenceConstruct", *made)
        new.name, old.name = old.name, None
        old.replace_all_uses_with(new)
    disconnect_subgraphs(node)  # which would still read weights
    editor.graph.remove(node, safe=True)
