"""Writes the fused operators of diffusion models as ONNX's own ones, with images whose channels come second.

ONNX Runtime's optimizer of U-Nets and VAEs writes convolutions and GroupNorms with channels last (NHWC), and adds
biases inside of operators. Nothing infers their shapes, no axes are known of them, and CPUs have no kernels. Engines
for GPUs get them back: see `engine_graphs.channels_last` and `engine_graphs.gelus`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.lazy_tensors import computed
from splitc.compiler.graphs.origins import take_place
from splitc.compiler.graphs.reads import all_nodes
from splitc.compiler.nodes import MICROSOFT, input_at, known_weight, operator_name, settings_of

FIRST, LAST = (0, 3, 1, 2), (0, 2, 3, 1)


def put_channels_first(model: ir.Model) -> bool:
    """Replace the operators, in place. Returns whether there were any."""
    editor = Editor(model.graph)
    nodes = [node for node in all_nodes(model.graph) if operator_name(node) in _FORMS]
    for node in nodes:
        _FORMS[operator_name(node)](node, editor)
    return bool(nodes)


def _convolution(node: ir.Node, editor: Editor) -> None:
    """NhwcConv (x, weight, bias). The weight is [outputs, height, width, inputs]."""
    data, weight, *bias = node.inputs
    tensor = known_weight(weight)
    if tensor is None or weight is None:
        turned = editor.before(node, "Transpose", weight, perm=FIRST)
    else:
        key = (f"{weight.name} with channels first", b"")
        shape = [tensor.shape.numpy()[axis] for axis in FIRST]
        name = f"{weight.name}_channels_first"
        turned = editor.find(key) or editor.add(key, computed(tensor, shape, name, lambda a: a.transpose(FIRST)))
    first = editor.before(node, "Transpose", data, perm=FIRST)
    made = editor.before(node, "Conv", first, turned, *bias, **settings_of(node))
    editor.replace(node, ir.node("Transpose", [made], {"perm": LAST}))


def _group_norm(node: ir.Node, editor: Editor) -> None:
    """GroupNorm (x, scale, shift), and SkipGroupNorm (x, scale, shift, skip, bias), which also gives the sum."""
    data, *weights = node.inputs[:3]
    tensors, dtype, is_skip = list(map(known_weight, weights)), _dtype(data), node.op_type == "SkipGroupNorm"
    if data is None or dtype is None or tensors[0] is None or tensors[1] is None:
        return
    if node.attributes.get_int("channels_last", 1) != 1 or (is_skip and not _adds_images(node)):
        return
    for added in (input_at(node, 4), input_at(node, 3)) if is_skip else ():
        data = data if added is None else editor.before(node, "Add", data, added, dtype=dtype)
    scale, shift = (editor.constant(t.numpy().astype(dtype.numpy()).reshape(-1, 1, 1)) for t in tensors if t)
    groups, epsilon = node.attributes.get_int("groups", 1), node.attributes.get_float("epsilon", 1e-5)
    ones, zeros = (editor.constant(np.full(groups, number, dtype.numpy())) for number in (1, 0))
    first = editor.before(node, "Transpose", data, perm=FIRST)
    grouped = editor.before(node, "Reshape", first, editor.numbers(0, groups, -1))
    normal = editor.before(node, "InstanceNormalization", grouped, ones, zeros, epsilon=epsilon)
    whole = editor.before(node, "Reshape", normal, editor.before(node, "Shape", first))
    made = editor.before(node, "Add", editor.before(node, "Mul", whole, scale), shift)
    if node.attributes.get_int("activation", 0):
        made = editor.before(node, "Mul", made, editor.before(node, "Sigmoid", made))
    if len(node.outputs) > 1:
        take_place(data, node.outputs[1])
        node.resize_outputs(1)
    editor.replace(node, ir.node("Transpose", [made], {"perm": LAST}))


def _adds_images(node: ir.Node) -> bool:
    """Whether what a SkipGroupNorm adds has four axes: it may have two, [n, channels], which Add would not align."""
    skip = input_at(node, 3)
    maker = None if skip is None else skip.producer()
    if skip is not None and skip.shape is not None:
        return len(skip.shape) == 4
    return maker is not None and maker.op_type not in ("Gemm", "MatMul", "Squeeze", "Gather")


def _dtype(value: ir.Value | None) -> ir.DataType | None:
    """The type of an image, as far as it follows from the operators that made it."""
    while value is not None and value.dtype in (None, ir.DataType.UNDEFINED):
        node = value.producer()
        if node is None:
            return None
        if node.op_type == "Cast":
            return ir.DataType(node.attributes.get_int("to", 0))
        value = node.inputs[1 if node.op_type == "Conv" else 0]
    return None if value is None else value.dtype


def _bias_add(node: ir.Node, editor: Editor) -> None:
    """BiasAdd (x, bias, skip)."""
    data, bias, skip = node.inputs
    editor.replace(node, ir.node("Add", [editor.before(node, "Add", data, bias), skip]))


def _split_gelu(node: ir.Node, editor: Editor) -> None:
    """BiasSplitGelu (x, bias): the left half times the Gelu of the right one."""
    data, bias = node.inputs
    tensor = known_weight(bias)
    if tensor is None:
        return
    split = ir.node("Split", [editor.before(node, "Add", data, bias)], {"axis": -1}, num_outputs=2)
    node.prepend(split)
    editor.set_lengths(split, [tensor.size // 2] * 2)
    left, right = split.outputs
    gate = editor.before(node, "Gelu", right, domain=MICROSOFT)
    editor.replace(node, ir.node("Mul", [left, gate]))


_FORMS: Mapping[str, Callable[[ir.Node, Editor], None]] = {
    "com.microsoft.NhwcConv": _convolution,
    "com.microsoft.GroupNorm": _group_norm,
    "com.microsoft.SkipGroupNorm": _group_norm,
    "com.microsoft.BiasAdd": _bias_add,
    "com.microsoft.BiasSplitGelu": _split_gelu,
}
