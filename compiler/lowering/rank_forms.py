"""Rewrites nodes of a rank graph that would compute something else from shards than from whole values."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx_ir as ir

from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.origins import hand_over
from splitc.compiler.lowering.open_shapes import open_shape
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Factor
from splitc.compiler.operators.operation import Operation
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.sharding.shards import Shards

# The types that both ONNX Runtime's Where and splitc's all-reduces support.
_CHOSEN = frozenset(ir.DataType[name] for name in ("FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16", "INT32", "INT64"))
# The first opset in which a Gemm may have no bias.
GEMM_WITHOUT_BIAS = 11
# The operator of a reduction over the ranks, as TensorRT defines it.
COLLECTIVE = "DistCollective"


class RankEditor(Editor):
    """A rank's graph while it is rewritten, with the rank's shards and the number of ranks."""

    def __init__(self, graph: ir.Graph, shards: Shards, ranks: int) -> None:
        super().__init__(graph)
        self.shards, self.ranks = shards, ranks

    def all_reduce(self, operation: str) -> dict[str, Any]:
        """Attributes of an all-reduce node over all ranks. `operation` is "sum" or "max"."""
        return {"collective_operation": "all_reduce", "reduce_op": operation, "root": -1, "nb_rank": self.ranks}


def sum_over_ranks(editor: RankEditor, value: ir.Value) -> ir.Value:
    """Replace a partial value by its sum over the ranks."""
    whole = editor.wrap(value, COLLECTIVE, [value], "part", **editor.all_reduce("sum"))
    whole.shape = whole.shape or open_shape(whole)
    return whole


def uncounted(editor: Editor, value: ir.Value) -> ir.Value:
    """Replace a value by zeros: this rank adds nothing to the sum."""
    return editor.wrap(value, "Where", _zeros_of(editor, value), "uncounted")


def _zeros_of(editor: Editor, value: ir.Value) -> list[ir.Value]:
    """The inputs of the Where that makes zeros of a value. A product would make NaN of inf."""
    return [editor.constant(np.array(False)), value, editor.scalar(0, value)]


def mask_unowned(editor: RankEditor, node: ir.Node, operation: Operation) -> None:
    """Replace elements that a node sums over, but another rank adds to the sum, by zeros.

    Ranks may hold copies of the same units, of which one rank owns each. The mask is for a rank that owns units of some
    sections and not of others. If it owns none, its whole result is `uncounted` instead.
    """
    present = set(ax.atoms(operation.contracted))
    for leaf in ax.leaves(operation.contracted):
        if not editor.shards.owns((leaf,), present=present) or editor.shards.owns((leaf,), all, present):
            continue
        number, place = _find_leaf(operation, leaf)
        data, axes = node.inputs[number], operation.input(number)
        assert data is not None and data.dtype is not None
        shape = (-1, *[1] * (len(axes) - place - 1))
        kept = editor.constant(editor.shards.owned_mask(axes[place], present).reshape(shape))
        zero = operation.zero_point
        zero_point = node.inputs[zero] if zero is not None and operation.has(zero) else None
        filler = zero_point or editor.scalar(0, data)
        node.replace_input_with(number, editor.before(node, "Where", kept, data, filler, dtype=data.dtype))


def _find_leaf(operation: Operation, leaf: Factor) -> tuple[int, int]:
    """The index of the first input that has the leaf factor, and the index of the axis."""
    return next(
        (number, place)
        for number, axes in enumerate(operation.inputs)
        for place, axis in enumerate(axes or ())
        if leaf in ax.leaves(axis)
    )


def set_split_lengths(editor: RankEditor, node: ir.Node, operation: Operation) -> None:
    """Give a Split without lengths explicit ones, if the rank's shards of the parts differ in length."""
    axis = node.attributes.get_int("axis", 0)
    sections = [axes[axis] for axes in operation.outputs if axes is not None]
    sizes = list(map(editor.shards.size, sections))
    if len(set(sizes)) == 1 or not any(map(editor.shards.is_split, sections)):
        return
    editor.set_lengths(node, sizes)


def keep_directions(editor: RankEditor, node: ir.Node, operation: Operation) -> None:
    """Give a recurrent network with one of two directions that direction, and its activations."""
    if not editor.shards.is_split(operation.directions):
        return
    (own,) = editor.shards.indices(operation.directions)
    node.attributes["direction"] = ir.AttrString("direction", ("forward", "reverse")[own])
    if activations := node.attributes.get_strings("activations", None):
        count = len(activations) // 2
        node.attributes["activations"] = ir.AttrStrings("activations", activations[own * count : (own + 1) * count])


def look_up(editor: RankEditor, node: ir.Node, operation: Operation) -> ir.Value:
    """Make a Gather of a sharded table return zeros for rows that the rank does not have. The result is partial.

    Two constants of the whole table's length hold each row's index in the rank's shard, and whether the row is there.
    The indices are first looked up in these: so negative ones still count from the end, and those out of bounds fail.
    """
    (atom,) = ax.leaves(operation.contracted)
    own, indices, rows = editor.shards.ranges[atom], node.inputs[1], node.outputs[0]
    assert indices is not None and indices.dtype is not None and rows.dtype is not None
    shifted = np.arange(atom.size) - own.start
    places = np.clip(shifted, 0, own.size - 1)
    inside = editor.before(node, "Gather", editor.constant(places.astype(indices.dtype.numpy())), indices)
    mask = editor.before(node, "Gather", editor.constant((shifted == places)[:, None]), indices)
    node.replace_input_with(1, inside)
    return editor.wrap(rows, "Where", [mask, rows, editor.scalar(0, rows)], "any")


def scale_mean(editor: RankEditor, node: ir.Node, operation: Operation) -> ir.Value:
    """Multiply the mean over a shard by the rank's share of the whole axis. The result is partial."""
    mean = node.outputs[0]
    return editor.wrap(mean, "Mul", [mean, editor.scalar(editor.shards.share((operation.contracted,)), mean)], "own")


def reduce_statistics(editor: RankEditor, node: ir.Node, operation: Operation) -> ir.Value | None:
    """Replace a node that needs statistics of a sharded axis, such as a norm: an all-reduce computes them.

    Returns the all-reduce's result if it is sums, which may be joined with those of another norm.
    """
    match node.op_type:
        case "DynamicQuantizeLinear":
            reduce_quantizer(editor, node)
        case "ReduceMax" | "ReduceMin":
            reduce_extreme(editor, node)
        case "ReduceL2":
            reduce_l2(editor, node, operation)
        case _:
            return reduce_norm(editor, node, operation)
    return None


def reduce_norm(editor: RankEditor, node: ir.Node, operation: Operation) -> ir.Value:
    """Decompose a norm over a sharded last axis, with an all-reduce of its sums.

    Returns these: of the squares [..., 1] for RMSNorm, of the elements and the squares [..., 2] for LayerNorm.
    """
    data, made, axis = node.inputs[0], node.outputs[0], operation.reduced
    assert data is not None and data.dtype is not None
    op, is_single = functools.partial(editor.before, node, dtype=ir.DataType.FLOAT), data.dtype == ir.DataType.FLOAT

    def number(value: float) -> ir.Value:
        return editor.constant(np.array(value, np.float32))

    centered = wide = data if is_single else op("Cast", data, to=ir.DataType.FLOAT)
    whole = _reduce_sums(editor, node, operation, wide)
    squares = means = op("Mul", whole, number(1 / ax.size_of(axis)))
    if operation.statistics > 1:
        mean, squares = (op("Gather", means, editor.constant(np.array([n])), axis=-1) for n in range(2))
        centered = op("Sub", wide, mean)
        # As ONNX Runtime on CPUs (core/providers/cpu/nn/layer_norm_impl.cc). Rounding may make the difference negative.
        squares = op("Max", op("Sub", squares, op("Mul", mean, mean)), number(0))
    root = op("Sqrt", op("Add", squares, number(node.attributes.get_float("epsilon", 1e-5))))
    normal = op("Div", centered, root)
    normal = normal if is_single else op("Cast", normal, dtype=data.dtype, to=data.dtype)
    scaled = op("Mul", normal, node.inputs[1], dtype=data.dtype)
    if len(node.inputs) > 2:
        scaled = op("Add", scaled, node.inputs[2], dtype=data.dtype)
    hand_over(made, scaled, "unused")
    made.replace_all_uses_with(scaled, replace_graph_outputs=True)
    return whole


def _reduce_sums(editor: RankEditor, node: ir.Node, operation: Operation, data: ir.Value) -> ir.Value:
    """The sums over all ranks of each row's squares [..., 1], or of its elements and its squares [..., 2]."""
    op, axis = functools.partial(editor.before, node, dtype=ir.DataType.FLOAT), operation.reduced
    zero, made = editor.constant(np.array(0, np.float32)), node.outputs[0]
    if editor.shards.owns(axis) and not editor.shards.owns(axis, all):
        data = op("Where", editor.constant(editor.shards.owned_mask(axis)), data, zero)
    sums = []
    for kind in ("ReduceSum", "ReduceSumSquare")[-operation.statistics :]:
        inputs, attributes = editor.lists(kind, axes=[-1])
        sums.append(op(kind, data, *inputs, **attributes))
    partial = op("Concat", *sums, axis=-1) if len(sums) > 1 else sums[0]
    if not editor.shards.owns(axis):
        partial = op("Where", *_zeros_of(editor, partial))
    whole = op(COLLECTIVE, partial, **editor.all_reduce("sum"))
    # These names must be the same on all ranks.
    partial.name, whole.name = f"{made.name}/sums/part", f"{made.name}/sums"
    whole.shape = None if made.shape is None else ir.Shape([*made.shape[:-1], len(sums)])
    return whole


def reduce_extreme(editor: RankEditor, node: ir.Node) -> None:
    """Replace a shard's maximum, or minimum, by that of the whole value: an all-reduce of maxima."""
    value, is_smallest = node.outputs[0], node.op_type == "ReduceMin"
    if is_smallest:
        value = editor.wrap(value, "Neg", [value], "smallest")
    value = editor.wrap(value, COLLECTIVE, [value], "part", **editor.all_reduce("max"))
    if is_smallest:
        editor.wrap(value, "Neg", [value], "largest")


def reduce_l2(editor: RankEditor, node: ir.Node, operation: Operation) -> None:
    """Replace a shard's L2 norm by that of the whole value: an all-reduce of its square."""
    data, value, axis = node.inputs[0], node.outputs[0], operation.reduced
    assert data is not None and operation.inputs[0] is not None
    if editor.shards.owns(axis) and not editor.shards.owns(axis, all):
        behind = len(operation.inputs[0]) - 1 - operation.inputs[0].index(axis)
        mask = editor.constant(editor.shards.owned_mask(axis).reshape(-1, *[1] * behind))
        own = editor.before(node, "Where", mask, data, editor.scalar(0, data), dtype=data.dtype)
        node.replace_input_with(0, own)
    squares = editor.wrap(value, "Mul", [value, value], "own") if editor.shards.owns(axis) else uncounted(editor, value)
    total = editor.wrap(squares, COLLECTIVE, [squares], "part", **editor.all_reduce("sum"))
    editor.wrap(total, "Sqrt", [total], "squares")


def reduce_quantizer(editor: RankEditor, node: ir.Node) -> None:
    """Decompose a DynamicQuantizeLinear by ONNX's definition, with the whole value's scale and zero point.

    An all-reduce of maxima computes the range of the whole value.
    """
    data, outputs = node.inputs[0], node.outputs
    assert data is not None
    number, op = np.float32, functools.partial(editor.before, node, dtype=ir.DataType.FLOAT)
    zero, last = editor.constant(np.array(0, number)), editor.constant(np.array(255, number))
    one, shape = editor.constant(np.array(1, number)), editor.numbers(1)
    ends = [op("ReduceMax", signed, keepdims=0) for signed in (data, op("Neg", data))]
    partial = op("Concat", *(op("Reshape", end, shape) for end in ends), axis=0)
    whole = op(COLLECTIVE, partial, **editor.all_reduce("max"))
    # These names must be the same on all ranks.
    partial.name, whole.name = f"{outputs[0].name}/range/part", f"{outputs[0].name}/range"
    first, second = (editor.constant(np.array(index, np.int64)) for index in (0, 1))
    top = op("Max", op("Gather", whole, first, axis=0), zero)
    bottom = op("Max", op("Gather", whole, second, axis=0), zero)
    extent = op("Add", top, bottom)
    scale = op("Where", op("Equal", extent, zero, dtype=ir.DataType.BOOL), one, op("Div", extent, last))
    places = op("Round", op("Min", op("Div", bottom, scale), last))
    point = op("Cast", places, to=ir.DataType.UINT8)
    quantized = op("QuantizeLinear", data, scale, point)
    for old, new in zip(outputs, (quantized, scale, point), strict=True):
        hand_over(old, new, "unused")
        old.replace_all_uses_with(new, replace_graph_outputs=True)


def summed_type(kind: ir.DataType) -> ir.DataType:
    """The type for an all-reduce of values of this type to which all but one rank add zeros."""
    return kind if kind in _CHOSEN else ir.DataType.FLOAT if kind.is_floating_point() else ir.DataType.INT64


def draw_once(editor: RankEditor, value: ir.Value, draws: bool) -> None:
    """Give all ranks the random numbers of one, by an all-reduce: only the rank with `draws` adds its own."""
    kind = value.dtype or ir.DataType.FLOAT
    summed = summed_type(kind)
    if summed != kind:
        value = editor.wrap(value, "Cast", [value], "drawn", summed, to=summed)
    if not draws:
        value = uncounted(editor, value)
    value = sum_over_ranks(editor, value)
    if summed != kind:
        editor.wrap(value, "Cast", [value], "sum", kind, to=kind)


def zero_added(editor: Editor, node: ir.Node, number: int) -> None:
    """Replace an input of an addition by zeros that depend on it."""
    value = node.inputs[number]
    assert value is not None
    zeros = editor.before(node, "Where", *_zeros_of(editor, value))
    zeros.type, zeros.shape = value.type, value.shape
    node.replace_input_with(number, zeros)


def drop_added(editor: Editor, node: ir.Node, added: frozenset[int], contracts: bool) -> ir.Value:
    """Drop the inputs `added` of an addition, or the bias of a product: another rank adds them to the partial sum.

    `contracts`: the node is a product over a sharded axis. A bias that the opset requires becomes zero. Returns the
    value that replaces the node's result.
    """
    operator = operator_of(node)
    if contracts:
        is_needed = node.op_type == "Gemm" and editor.graph.opset_imports.get("", 17) < GEMM_WITHOUT_BIAS
        none = editor.scalar(0, node.outputs[0]) if is_needed else None
        inputs = [none if number in added else value for number, value in enumerate(node.inputs)]
        while inputs and inputs[-1] is None:
            inputs.pop()
        gone = {operator.scaling_attributes.get(number) for number in added}
        attributes = [attribute for name, attribute in node.attributes.items() if name not in gone]
        return editor.replace(node, ir.Node(node.domain, node.op_type, inputs, attributes, name=node.name))
    kept = {number: value for number, value in enumerate(node.inputs) if number not in added}
    if len(kept) > 1:
        return editor.replace(node, ir.node(node.op_type, list(kept.values())))
    ((number, value),) = kept.items()
    return editor.replace(node, ir.node("Neg" if number in operator.negated_inputs else "Identity", [value]))
