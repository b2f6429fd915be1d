"""Folds small constants, and bypasses nodes without effect.

torch's newer exporter leaves such nodes to its optimizer, and writes many if that does not run. Passes that match a
pattern would have to skip them.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable

import onnx_ir as ir

from splitc.compiler.graphs.editor import Editor, add_initializer
from splitc.compiler.graphs.matching import constant_numbers, is_onnx, list_of
from splitc.compiler.graphs.node_key import node_key
from splitc.compiler.graphs.optional import defaults_hidden
from splitc.compiler.graphs.reads import all_nodes
from splitc.compiler.inference.folding import LONGEST, fold, known_array
from splitc.compiler.nodes import input_at, inputs_of, known_tensor
from splitc.compiler.operators.registry import operator_of

# The types of sizes, positions and conditions. Constants of other types are weights, unless they have one element.
_OF_SIZES = frozenset(ir.DataType[name] for name in ("INT64", "INT32", "BOOL"))
# Exporters write the end of an axis as the largest number of 64 or of 32 bits, or (tf2onnx) as a billion.
ANY_END = 10**9


def fold_constants(graph: ir.Graph) -> bool:
    """Replace nodes that compute from constant sizes, conditions and scalars alone by constants, in place.

    If shapes were inferred, so are sizes that are the same in all requests, such as that of a head. What is computed
    from weights is not folded, except for sizes of weights: names and shards are those of the model's own weights.
    Returns whether any node was replaced.
    """
    known = {value for value in graph.initializers.values() if _is_number(value)}
    with defaults_hidden(graph):
        for node in graph:
            reads = inputs_of(node)
            of_weight = operator_of(node).reads_shape and all(value.is_initializer() for value in reads)
            if not _selects_fixed(node):
                _forget(node)  # inference rounds quotients otherwise than ONNX does
                is_known = bool(reads) and (of_weight or known.issuperset(reads))
                if not (is_known and fold(node) and all(map(_is_list, node.outputs))):
                    _forget(node)
                    continue
            known.update(node.outputs)
        is_changed = keep_folded(graph, known)
        return _slice_empty(graph) or is_changed


def _selects_fixed(node: ir.Node) -> bool:
    """Whether a node only selects sizes, and inference knows them as numbers."""
    operator = operator_of(node)
    return (operator.reads_shape or operator.passes_sizes) and all(
        value.const_value is not None and value.dtype in _OF_SIZES and value.const_value.size <= LONGEST
        for value in node.outputs
    )


def _forget(node: ir.Node) -> None:
    for value in node.outputs:
        if value.const_value is not None:  # setting it is slow
            value.const_value = None


def _is_number(value: ir.Value) -> bool:
    tensor = known_tensor(value)
    if tensor is None:
        return False
    if tensor.dtype in _OF_SIZES:
        return tensor.size <= LONGEST
    return tensor.size == 1 and tensor.dtype.is_floating_point()


def _is_list(value: ir.Value) -> bool:
    """Whether a folded value is anything but a floating-point matrix. A matrix would be taken for a weight."""
    return value.dtype in _OF_SIZES or value.shape is None or len(value.shape) < 2


def keep_folded(graph: ir.Graph, known: Collection[ir.Value]) -> bool:
    """Replace nodes whose outputs are all known by initializers, in place. Returns whether there are any."""
    nodes = [node for node in graph if node.outputs and all(value in known for value in node.outputs)]
    for node in nodes:
        for old in node.outputs:
            array = known_array(old)
            assert array is not None
            name, old.name = old.name, None
            new = add_initializer(graph, ir.tensor(array, name=name))
            old.replace_all_uses_with(new, replace_graph_outputs=True)
        graph.remove(node, safe=True)
    return bool(nodes)


def _slice_empty(graph: ir.Graph) -> bool:
    """Let a Slice make what an Expand makes empty by constant sizes, in place. Returns whether there is any.

    ONNX Runtime takes an Expand whose sizes are all constants below two for one without effect. An empty list that a
    loop over tokens was traced with is expanded so.
    """
    editor, is_changed = Editor(graph), False
    for node in [node for node in graph if is_onnx(node, "Expand")]:
        sizes = constant_numbers(node.inputs[1]) or []
        places = [place - len(sizes) for place, size in enumerate(sizes) if size == 0]
        if not places:
            continue
        made, none = node.outputs[0], [0] * len(places)
        lists, attributes = editor.lists("Slice", starts=none, ends=none, axes=places)
        node.replace_input_with(1, editor.numbers(*(size or 1 for size in sizes)))
        editor.wrap(made, "Slice", [made, *lists], "expanded", **attributes)
        if made.shape is not None:
            empty = {len(made.shape) + place for place in places}
            made.shape = ir.Shape([1 if place in empty else size for place, size in enumerate(made.shape)])
        is_changed = True
    return is_changed


def bypass_same(graph: ir.Graph) -> None:
    """Bypass nodes whose output is their first input, in place.

    If the output is one of the model's, the input takes its place, unless it is an output already, or no node makes it.
    """
    for node in all_nodes(graph):
        value = node.inputs[0] if node.inputs and not node.domain else None
        if value is not None and _is_same(node, value):
            bypass(graph, node, value)


def bypass(graph: ir.Graph, node: ir.Node, value: ir.Value) -> bool:
    """Let readers of a node's output read an equal `value`, in place. Returns whether they do; see `bypass_same`."""
    made, maker = node.outputs[0], value.producer()
    if not made.is_graph_output():
        made.replace_all_uses_with(value)
        return True
    if maker is None or not (maker.graph is graph is node.graph) or value.is_graph_output():
        return False
    made.replace_all_uses_with(value, replace_graph_outputs=True)
    value.name, made.name = made.name, None
    value.type, value.shape = made.type or value.type, made.shape or value.shape
    return True


def merge_casts(graph: ir.Graph) -> None:
    """Merge equal casts of a value, in place.

    Without its optimizer, torch's exporter casts the input of a norm once for its squares, and once for its product.
    """
    first: dict[Hashable, ir.Value] = {}
    for node in graph:
        (made,) = node.outputs if is_onnx(node, "Cast") else (None,)
        if made is not None and not made.is_graph_output():
            kept = first.setdefault((node.inputs[0], node_key(node)), made)
            if kept is not made:
                made.replace_all_uses_with(kept)


def _is_same(node: ir.Node, value: ir.Value) -> bool:
    """Whether a node returns its first input unchanged.

    Exporters write a Concat of one input where an empty cache of transformers was dropped, and an Identity where layers
    share a weight.
    """
    match node.op_type:
        case "Identity":
            return True
        case "Concat":
            return len(node.inputs) == 1
        case "Cast":
            return value.dtype is not None and value.dtype == node.attributes.get_int("to", 0)
        case "Dropout":
            mode = input_at(node, 2)
            is_read = any(made.uses() or made.is_graph_output() for made in node.outputs[1:])
            return not is_read and (mode is None or constant_numbers(mode) == [0])
        case "Pad":
            return not any(list_of(node, "pads") or [1])
        case "Transpose":
            order = node.attributes.get_ints("perm", ())
            return bool(order) and list(order) == sorted(order)
        case "Slice":
            return _takes_all(node)
        case _:
            return False


def _takes_all(node: ir.Node) -> bool:
    """Whether a Slice takes all of its axes in every request."""
    bounds = [*node.inputs[1:], None, None, None, None][:4]
    starts, ends, _, steps = map(constant_numbers, bounds)
    is_forward = len(node.inputs) < 5 or set(steps or ()) == {1}
    return set(starts or ()) == {0} and min(ends or [0]) >= ANY_END and is_forward
