"""Rewrites nodes for which ONNX Runtime's CUDA provider has no kernel, or a slow one, where results stay the same.

Nodes that run on the CPU keep a graph from being captured.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from splitc.compiler.engine_graphs.attention_nodes import Nodes, put_in_place
from splitc.compiler.engine_graphs.convolutions import add_axis, has_no_plan, pad_evenly
from splitc.compiler.engine_graphs.cpu_values import SMALL, runs_on_gpu
from splitc.compiler.graphs.editor import Editor, describe
from splitc.compiler.graphs.matching import constant, is_onnx, made_by, only_user
from splitc.compiler.graphs.origins import described, own_shape
from splitc.compiler.graphs.reads import all_nodes
from splitc.compiler.nodes import input_at, inputs_of, known_weight, settings_of
from splitc.compiler.operators.gpu_kernels import HALVES, LAST_OPSET, has_gpu_kernel, is_too_new, typed_input
from splitc.compiler.operators.indexing import marked_places

WHOLE = (ir.DataType.INT32, ir.DataType.INT64)
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
# The reduction that finds the value whose index an operator returns.
EXTREMES = {"ArgMax": "ReduceMax", "ArgMin": "ReduceMin"}
# The most inputs of a Concat that ONNX Runtime 1.31 captures (core/providers/cuda/tensor/concat.cc).
MOST_JOINED = 32
NARROW, WIDE = ir.DataType.BFLOAT16, ir.DataType.FLOAT
_INT32, _INT64, _DOUBLE = ir.DataType.INT32, ir.DataType.INT64, ir.DataType.DOUBLE
# Wider types by type, the best first.
WIDER = {
    **dict.fromkeys(HALVES, (WIDE,)),
    ir.DataType.BOOL: (ir.DataType.UINT8, _INT32, _DOUBLE),
    **dict.fromkeys((ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16), (_INT32, _INT64, _DOUBLE)),
    **dict.fromkeys((_INT32, ir.DataType.UINT32), (_INT64, _DOUBLE)),
}
# The operators that compute the same in a wider type, other than halves: they compare, choose or move.
EXACT = frozenset(
    {
        *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod", "Clip"),
        *("DepthToSpace", "SpaceToDepth", "GatherND", "Pad", "ReduceMax", "ReduceMin", "Tile", "Where"),
        *("ArgMax", "ArgMin", "Relu"),
    }
)


def give_kernel(node: ir.Node, editor: Editor) -> None:
    """Replace a node without a CUDA kernel by nodes with one, where the results are the same to the bit."""
    if is_onnx(node, "OneHot"):
        _replace_one_hot(node, editor)
    if is_onnx(node, "ConvTranspose"):
        pad_evenly(node, editor)
    if is_onnx(node, "Concat"):
        _join_in_groups(node, editor)
    if is_onnx(node, "Conv"):
        add_axis(node, editor)
    if is_onnx(node, "Greater"):
        _add_as_floats(node, editor)
    value = node.inputs[0] if node.inputs else None
    if value is None or runs_on_gpu(node):
        return
    dtype = described(value).dtype
    if node.op_type in EXTREMES and dtype in WHOLE:
        _find_extreme(node, value, editor)
    elif node.op_type == "DequantizeLinear" and dtype == ir.DataType.INT32:
        _multiply_by_scale(node, value, editor)
    elif node.op_type == "Pad" and dtype == ir.DataType.INT64 and not _is_list(value):
        _pad_halves(node, value, editor)
    elif node.op_type == "Celu" and dtype in FLOATS and node.attributes.get_float("alpha", 1.0) == 1:
        editor.replace(node, ir.node("Elu", [value]))  # the same function then


def _add_as_floats(node: ir.Node, editor: Editor) -> None:
    """Add truth values in single precision, where all that is asked is whether one is true.

    torch's older exporter writes `any` as a sum of integers, for which the CUDA provider has no fast kernel. On an H200
    an encoder of T5 with 6 layers of 2,048 looks for infinite halves so: for 512 tokens it took 14.8 ms, and takes 1.5.
    """
    total = made_by(node.inputs[0], "ReduceSum")
    cast = None if total is None else made_by(total.inputs[0], "Cast")
    truth = None if cast is None else cast.inputs[0]
    if total is None or truth is None or constant(node.inputs[1]) != 0 or described(truth).dtype != ir.DataType.BOOL:
        return
    if only_user(total.outputs[0], "Greater") is not node or described(total.outputs[0]).dtype == WIDE:
        return
    name = node.outputs[0].name
    number = editor.before(total, "Cast", truth, to=WIDE)
    describe(number, f"{name}/number", WIDE, own_shape(truth))
    added = editor.before(node, "ReduceSum", number, *total.inputs[1:], **settings_of(total))
    describe(added, f"{name}/added", WIDE, own_shape(total.outputs[0]))
    editor.replace(node, ir.node("Greater", [added, editor.constant(np.array(0, np.float32))]))


def _join_in_groups(node: ir.Node, editor: Editor) -> None:
    """Join the inputs of a Concat of very many in groups first. ONNX Runtime captures no kernel that takes more."""
    values, name = inputs_of(node), node.outputs[0].name
    dtype = described(values[0]).dtype
    while len(values) > MOST_JOINED:
        groups = [values[first : first + MOST_JOINED] for first in range(0, len(values), MOST_JOINED)]
        values = [editor.before(node, "Concat", *group, **settings_of(node)) for group in groups]
        for number, value in enumerate(values):
            describe(value, f"{name}/{number}of{len(values)}", dtype, None)
    if len(values) != len(node.inputs):
        editor.replace(node, ir.node("Concat", values, node.attributes))


def _is_list(value: ir.Value) -> bool:
    """Whether a value is known to have one axis, as sizes have."""
    shape = described(value).shape
    return shape is not None and len(shape) < 2


def _find_extreme(node: ir.Node, value: ir.Value, editor: Editor) -> None:
    """Replace ArgMax or ArgMin of integers: the index of the first element that equals the extreme."""
    axis, name = node.attributes.get_int("axis", 0), node.outputs[0].name
    axes, attributes = editor.lists("ReduceMax", axes=[axis])
    extreme = editor.before(node, EXTREMES[node.op_type], value, *axes, keepdims=1, **attributes)
    equal = editor.before(node, "Equal", value, extreme)
    marked = editor.before(node, "Cast", equal, to=ir.DataType.FLOAT)
    describe(extreme, f"{name}/extreme", described(value).dtype, None)
    describe(equal, f"{name}/equal", ir.DataType.BOOL, own_shape(value))
    describe(marked, f"{name}/marked", ir.DataType.FLOAT, own_shape(value))
    editor.replace(node, ir.node("ArgMax", [marked], node.attributes))


def _multiply_by_scale(node: ir.Node, value: ir.Value, editor: Editor) -> None:
    """Replace DequantizeLinear of int32 (a bias) by a product: its zero point is 0 by definition."""
    scale = node.inputs[1]
    dtype = None if scale is None else described(scale).dtype
    if _is_list(value) and dtype is not None:
        number = editor.before(node, "Cast", value, to=dtype)
        describe(number, f"{node.outputs[0].name}/number", dtype, own_shape(value))
        editor.replace(node, ir.node("Mul", [number, scale]))


def _pad_halves(node: ir.Node, value: ir.Value, editor: Editor) -> None:
    """Replace Pad of int64, such as a mask, by two of numbers of 32 bits in float64, which has them exactly."""
    b, factor = Nodes(f"{node.outputs[0].name}/halves", editor), editor.constant(np.array(1 << 32, np.int64))

    def halves(whole: ir.Value) -> tuple[ir.Value, ir.Value]:
        low = b.one("Mod", whole, factor)
        return low, b.one("Div", b.one("Sub", whole, low), factor)

    def padded(half: ir.Value, fill: ir.Value | None) -> ir.Value:
        wide, own = (None if one is None else b.one("Cast", one, to=ir.DataType.DOUBLE) for one in (half, fill))
        inputs = [wide, node.inputs[1], own, *node.inputs[3:]]
        return b.one("Cast", b.add("Pad", inputs, attributes=node.attributes.values())[0], to=ir.DataType.INT64)

    fill = input_at(node, 2)
    fills = (None, None) if fill is None else halves(fill)
    low, high = map(padded, halves(value), fills)
    put_in_place(node, b.made, [b.one("Add", b.one("Mul", high, factor), low)])


def _replace_one_hot(node: ir.Node, editor: Editor) -> None:
    """Replace OneHot of constant places by Gather, which stays on the CPU if its data do.

    torch's repeat_interleave is exported so: it picks the number of repeats, and 1 for the other axes.
    """
    places, depth, values = node.inputs
    wanted, most = known_weight(places), known_weight(depth)
    if wanted is None or most is None:
        return
    count = int(most.numpy().item())
    if wanted.size * count <= SMALL:
        picked = marked_places(node, wanted.numpy(), count)
        editor.replace(node, ir.node("Gather", [values, editor.constant(picked.astype(np.int64))]))


def widen(node: ir.Node, editor: Editor) -> None:
    """Insert casts around a node, perhaps in a branch, that has a kernel for a wider type but none for its own.

    ONNX Runtime has few CUDA kernels for bfloat16, and its CPU provider has hardly any either, so it would not load
    such a graph. Of float16 it lacks GridSample, and cuDNN has no plan for some convolutions. Kernels for halves
    compute in float32 too, and round their results once. Small integers and booleans have the same results in a wider
    type, to the bit.
    """
    first, types = typed_input(node), [None if value is None else described(value).dtype for value in node.inputs]
    narrow = types[first] if len(types) > first else None
    if narrow not in WIDER or (has_gpu_kernel(node, narrow) and not has_no_plan(node)):
        return
    wide = next((dtype for dtype in WIDER[narrow] if has_gpu_kernel(node, dtype)), None)
    if wide is None or (narrow not in HALVES and (node.domain or node.op_type not in EXACT)):
        return
    for number, (value, dtype) in enumerate(zip(node.inputs, types, strict=True)):
        if dtype == narrow and number >= first:
            cast = editor.before(node, "Cast", value, to=wide, dtype=wide)
            assert value is not None
            cast.name, cast.shape = f"{node.outputs[0].name}/wide{number}", value.shape  # unlike those around a branch
            node.replace_input_with(number, cast)
    for value in node.outputs:
        if described(value).dtype == narrow:
            editor.wrap(value, "Cast", [value], "wide", to=narrow)
            value.type = ir.TensorType(wide)


def use_older_opset(graph: ir.Graph) -> None:
    """Make a graph import opset `LAST_OPSET`, in place, if nodes get CUDA kernels by it and all compute the same.

    ONNX's opset 22 adds bfloat16 to many operators, and changes nothing else about them. ONNX Runtime registers some of
    its CUDA kernels for the older version alone: a MaxPool of opset 22 runs on the CPU, and one of opset 21 on the GPU.
    """
    opset = graph.opset_imports.get("", 1)
    if any(map(is_too_new, graph)) and all(_means_the_same(node, opset) for node in all_nodes(graph)):
        graph.opset_imports[""] = LAST_OPSET


def _means_the_same(node: ir.Node, opset: int) -> bool:
    """Whether a node computes the same in opset `LAST_OPSET`: its types and attributes exist there.

    Opsets 22 to 25 added types, and otherwise changed only operators that got other attributes.
    """
    if node.domain:
        return True
    try:
        new, old = (onnx.defs.get_schema(node.op_type, version) for version in (opset, LAST_OPSET))
    except onnx.defs.SchemaError:  # there was none
        return False
    if new.since_version == old.since_version:
        return True
    return node.attributes.keys() <= old.attributes.keys() and all(
        value is None or _takes(old, number, value) for number, value in enumerate(node.inputs)
    )


def _takes(schema: onnx.defs.OpSchema, number: int, value: ir.Value) -> bool:
    """Whether an operator accepts a value's type as this input. The last input of a schema may be variadic."""
    dtype = described(value).dtype
    allowed = schema.inputs[min(number, len(schema.inputs) - 1)].types
    return dtype is not None and f"tensor({dtype.name.lower()})" in allowed
