"""Replaces ONNX sequences by their parts, where these are known: sequences can't be sharded, nor their sizes inferred.

torch's newer exporter writes sequences for split, chunk and unbind, if it does not optimize. Optional values are
replaced by what they hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.matching import constant_numbers, is_onnx, made_by
from splitc.compiler.graphs.reads import all_nodes
from splitc.compiler.inference.symbolic import Shapes, shapes_by_onnx
from splitc.compiler.nodes import inputs_of

# The first opset whose Split takes its sizes as an input, as SplitToSequence does.
OPSET = 13
OF_OPTIONALS = ("OptionalGetElement", "OptionalHasElement")
# Behind the last value of any sequence.
END = 1 << 62


def replace_sequences(model: ir.Model) -> None:
    """Replace SequenceAt and ConcatFromSequence by nodes that read the parts themselves, in place.

    The node that makes a sequence stays, even without readers.
    """
    readers = [
        node
        for node in all_nodes(model.graph)
        if is_onnx(node, "SequenceAt", "ConcatFromSequence") and not node.outputs[0].is_graph_output()
    ]
    has_sizes = model.opset_imports.get("", 0) >= OPSET
    needs_shapes = has_sizes and any(made_by(node.inputs[0], "SplitToSequence") for node in readers)
    shapes = shapes_by_onnx(model) if needs_shapes else {}
    editor = Editor(model.graph)
    parts: dict[ir.Value, Sequence[ir.Value]] = {}
    for node in readers:
        (old,), sequence = node.outputs, node.inputs[0]
        assert sequence is not None  # both operators need it
        if sequence not in parts:
            parts[sequence] = parts_of(sequence, editor, shapes)
        listed = parts[sequence]
        new = (_selected if node.op_type == "SequenceAt" else _joined)(node, listed, editor)
        if new is not None:
            new.type = new.type or old.type
            new.shape = old.shape if new.shape is None else new.shape
            old.replace_all_uses_with(new)


def unwrap_optionals(model: ir.Model) -> None:
    """Replace what reads an optional value by what this holds, in place. ONNX Runtime has no kernels for it on GPUs."""
    editor = Editor(model.graph)
    for node in all_nodes(model.graph):
        wrapped = made_by(node.inputs[0], "Optional") if is_onnx(node, *OF_OPTIONALS) and node.inputs else None
        if wrapped is None or not wrapped.inputs or node.outputs[0].is_graph_output():
            continue
        held = editor.constant(np.array(True)) if node.op_type == "OptionalHasElement" else wrapped.inputs[0]
        if held is not None:
            node.outputs[0].replace_all_uses_with(held)


def parts_of(sequence: ir.Value, editor: Editor, shapes: Shapes) -> Sequence[ir.Value]:
    """The parts of a sequence; none if it is not known how many there are."""
    if (listed := _listed(sequence)) is not None:
        return listed
    split = made_by(sequence, "SplitToSequence")
    sizes = split.inputs[1] if split is not None and len(split.inputs) > 1 else None
    if split is None or sizes is None or (shape := shapes.get(sizes.name)) is None:
        return []
    if shape.rank() == 0:
        lengths = _chunks(split, sizes, shapes)
        count, sizes = len(lengths), editor.numbers(*lengths) if lengths else sizes
    else:
        count = shape[0] if isinstance(shape[0], int) else 0
    return _after(split, "Split", [split.inputs[0], sizes], editor, count) if count else []


def _listed(sequence: ir.Value | None) -> list[ir.Value] | None:
    """The values that a sequence was made of, one by one or all at once; None if they are not known."""
    made = made_by(sequence, "SequenceConstruct", "SequenceEmpty", "SequenceInsert")
    if made is None:
        return None
    values = inputs_of(made)
    if made.op_type != "SequenceInsert":
        return values
    listed, places = _listed(values[0]), constant_numbers(values[2]) if len(values) > 2 else [END]
    if listed is None or places is None:
        return None
    listed.insert(places[0], values[1])
    return listed


def _chunks(split: ir.Node, size: ir.Value, shapes: Shapes) -> list[int]:
    """The lengths of parts of equal length, of which the last one may be shorter; none if they are not known."""
    data, step = split.inputs[0], constant_numbers(size)
    shape = None if data is None else shapes.get(data.name)
    whole = None if shape is None else shape[split.attributes.get_int("axis", 0)]
    if step is None or not isinstance(whole, int):
        return []
    (length,) = step
    return [min(length, whole - begin) for begin in range(0, whole, length)]


def _selected(node: ir.Node, parts: Sequence[ir.Value], editor: Editor) -> ir.Value | None:
    """The part that a SequenceAt selects; None if it is not known."""
    split, place = made_by(node.inputs[0], "SplitToSequence"), node.inputs[1]
    if split is not None and len(split.inputs) == 1 and not split.attributes.get_int("keepdims", 1):
        axis = split.attributes.get_int("axis", 0)
        return _after(node, "Gather", [split.inputs[0], place], editor, axis=axis)[0]
    (number,) = constant_numbers(place) or [len(parts)]
    return parts[number] if -len(parts) <= number < len(parts) else None


def _joined(node: ir.Node, parts: Sequence[ir.Value], editor: Editor) -> ir.Value | None:
    """A Concat of the known parts in place of a ConcatFromSequence, which may stack them along a new axis."""
    if not parts:
        return None
    if node.attributes.get_int("new_axis", 0) == 1:
        parts = [_thin(part, node, editor) for part in parts]
    return _after(node, "Concat", parts, editor)[0]


def _thin(part: ir.Value, node: ir.Node, editor: Editor) -> ir.Value:
    """A part with one more axis, of one element: that along which a ConcatFromSequence stacks."""
    axes, attributes = editor.lists("Unsqueeze", axes=[node.attributes.get_int("axis", 0)])
    made = editor.before(node, "Unsqueeze", part, *axes, dtype=part.dtype, **attributes)
    editor.name(made, part.name)
    return made


def _after(
    node: ir.Node,
    operator: str,
    inputs: Sequence[ir.Value | None],
    editor: Editor,
    count: int = 1,
    axis: int | None = None,
) -> Sequence[ir.Value]:
    """The results of a new node that is inserted after `node`, with the attribute `axis`, or that of `node`."""
    number = node.attributes.get_int("axis", 0) if axis is None else axis
    new = ir.node(operator, inputs, {"axis": number}, num_outputs=count, name=node.name)
    node.append(new)
    for value in new.outputs:
        editor.name(value, node.outputs[0].name)
    return new.outputs
