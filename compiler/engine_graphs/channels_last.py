"""Computes GroupNorms and the convolutions around them with channels last (NHWC), on GPUs in half precision.

Tensor cores need channels last, so cuDNN transposes the data before and after each convolution. ONNX Runtime's operator
GroupNorm, which includes SiLU, takes channels last only; decomposed, the norm is cuDNN's batch norm, a scale, a shift
and two passes for SiLU. On an H200 both together take 0.5 to 0.65 of the time (tests/benchmarks/fused_attention.py),
and the decoder of SDXL's VAE takes 38 ms instead of 80 (tests/gpu/fused.py). Transposes are added around these
operators; ONNX Runtime removes those between two of them when it loads the engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from splitc.compiler.engine_graphs.gpu_functions import call
from splitc.compiler.engine_graphs.skip_norms import known_shape
from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.lazy_tensors import computed
from splitc.compiler.graphs.matching import (
    combined,
    constant_numbers,
    is_onnx,
    is_own,
    made_by,
    only_user,
    tensor_of,
    value_before,
)
from splitc.compiler.graphs.origins import described, planned_shape, take_place
from splitc.compiler.graphs.walks import producer_of
from splitc.compiler.nodes import known_weight
from splitc.compiler.request.shapes import Shape
from splitc.runtime.arrays.array import Array

CHANNELS_LAST, CHANNELS_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
# The most channels of a group that the kernel supports; it must be even (group_norm_common_base.h of ONNX Runtime).
MOST_CHANNELS = 512
# The most elements of an image: the kernel counts them in 32 bits (group_norm_impl.cu).
MOST_NUMBERS = 2**31 - 1
# Tensor cores read and write multiples of this many channels. cuDNN pads input channels, but does not use tensor cores
# for other numbers of output channels. Unpadded, the decoder of SDXL's VAE, with 3 at its end, took 37.9 ms on an H200.
CHANNELS_AT_ONCE = 8


@dataclass(frozen=True)
class _GroupNorm:
    """A GroupNorm of `data` [n, c, h, w], followed by SiLU if it `activates`. `last` is its last node."""

    data: ir.Value
    groups: int
    epsilon: float
    scale: ir.TensorProtocol
    shift: ir.TensorProtocol
    activates: bool
    last: ir.Node


def use_channels_last(graph: ir.Graph, shapes: Mapping[str, Shape]) -> None:
    """Replace GroupNorms, and the convolutions of a graph that has a GroupNorm, in place.

    `shapes` are those of the model's values. Nodes without readers afterwards stay.
    """
    editor = Editor(graph)
    norms = [norm for node in graph if (norm := _find_norm(node, shapes)) is not None]
    for norm in norms:
        _write_norm(norm, editor)
    for node in list(graph) if norms else ():
        if _is_wide_convolution(node, shapes):
            _write_convolution(node, editor)


def _find_norm(node: ir.Node, shapes: Mapping[str, Shape]) -> _GroupNorm | None:
    """The GroupNorm around a node that normalizes; None for other nodes, and if the kernel does not support it."""
    norm = _of_operator(node) or _of_instances(node)
    if norm is None or not _are_images(norm.data, norm.scale, shapes) or norm.scale.size != norm.shift.size:
        return None
    # The rank's own channels, which may be a shard of the model's.
    channels = norm.scale.size
    fits = channels % (2 * norm.groups) == 0 and channels // norm.groups <= MOST_CHANNELS
    return norm if fits and channels * math.prod(planned_shape(norm.data, shapes)[2:]) <= MOST_NUMBERS else None


def _of_operator(node: ir.Node) -> _GroupNorm | None:
    if not is_onnx(node, "GroupNormalization"):
        return None
    data, scale, shift = node.inputs
    groups, epsilon = node.attributes.get_int("num_groups", 0), node.attributes.get_float("epsilon", 1e-5)
    return _with_weights(node, data, scale, shift, groups, epsilon)


def _of_instances(node: ir.Node) -> _GroupNorm | None:
    """The GroupNorm that is decomposed to an InstanceNormalization of [n, groups, ...] between Reshapes; else None."""
    if not is_onnx(node, "InstanceNormalization"):
        return None
    grouped, ones, zeros = node.inputs
    first, back = made_by(grouped, "Reshape"), only_user(node.outputs[0], "Reshape")
    scaled = None if back is None else combined(back.outputs[0], "Mul")
    shifted = None if scaled is None else combined(scaled[1], "Add")
    if first is None or back is None or scaled is None or shifted is None:
        return None
    (scale, _), (shift, result) = scaled, shifted
    data, groups = first.inputs[0], _filled(ones, 1)
    if data is None or groups is None or _filled(zeros, 0) != groups or not _is_grouped(first, groups):
        return None
    if not _is_back(back, data, result) or not (_is_by_channel(scale) and _is_by_channel(shift)):
        return None
    return _with_weights(producer_of(result), data, scale, shift, groups, node.attributes.get_float("epsilon", 1e-5))


def _with_weights(
    last: ir.Node, data: ir.Value | None, scale: ir.Value | None, shift: ir.Value | None, groups: int, epsilon: float
) -> _GroupNorm | None:
    """The GroupNorm with its weights, and with SiLU if nothing else reads its result."""
    by_channel = [known_weight(value_before(value, "Reshape", "Unsqueeze") or value) for value in (scale, shift)]
    if data is None or groups <= 0 or by_channel[0] is None or by_channel[1] is None:
        return None
    activation = _silu(last.outputs[0])
    return _GroupNorm(data, groups, epsilon, by_channel[0], by_channel[1], activation is not None, activation or last)


def _filled(value: ir.Value | None, number: float) -> int | None:
    """The size of a constant vector whose elements are all this number; None for other values."""
    tensor = known_weight(value)
    array = None if tensor is None or len(tensor.shape) != 1 else tensor.numpy()
    return None if array is None or not (array == number).all() else array.size


def _is_grouped(reshape: ir.Node, groups: int) -> bool:
    """Whether a Reshape of [n, c, h, w] gives [n, groups, ...], by its constant target or by the model's shapes."""
    data, target = reshape.inputs
    whole, numbers = None if data is None else described(data).shape, constant_numbers(target)
    if numbers is not None:
        batches = [0] if whole is None else [0, whole[0]]
        return len(numbers) == 3 and numbers[0] in batches and numbers[1] == groups
    shape = described(reshape.outputs[0]).shape
    return shape is not None and whole is not None and len(shape) == 3 and (shape[0], shape[1]) == (whole[0], groups)


def _is_back(reshape: ir.Node, data: ir.Value, result: ir.Value) -> bool:
    """Whether a Reshape restores the shape of the data: the target is that Shape, or the model declares both equal."""
    wanted, target = known_shape(data), reshape.inputs[1]
    shape = made_by(target, "Shape")
    if shape is not None and not _returns_part(shape):
        return shape.inputs[0] is data
    return wanted is not None and wanted == known_shape(result)


def _returns_part(shape: ir.Node) -> bool:
    """Whether a Shape returns only some of the sizes."""
    return shape.attributes.get_int("start", 0) != 0 or "end" in shape.attributes


def _is_by_channel(value: ir.Value) -> bool:
    """Whether a value is [c, 1, 1] or [1, c, 1, 1]."""
    shape = list(described(value).shape or ())
    return len(shape) in (3, 4) and shape[-2:] == [1, 1] and shape[:-3] in ([], [1])


def _silu(value: ir.Value) -> ir.Node | None:
    """The Mul of x sigmoid(x), if nothing else reads x; else None."""
    users = dict.fromkeys(node for node, _ in value.uses())
    if len(users) != 2 or value.is_graph_output():
        return None
    gate = next((node for node in users if is_onnx(node, "Sigmoid")), None)
    product = None if gate is None else only_user(gate.outputs[0], "Mul")
    return product if product in users and product is not None and value in product.inputs else None


def _are_images(value: ir.Value, weight: ir.TensorProtocol, shapes: Mapping[str, Shape]) -> bool:
    """Whether a value is [n, c, h, w], and the weight that it meets is float16."""
    return weight.dtype == ir.DataType.FLOAT16 and len(planned_shape(value, shapes)) == 4


def _write_norm(norm: _GroupNorm, editor: Editor) -> None:
    weights = [editor.constant(tensor.numpy().astype(np.float32).reshape(-1)) for tensor in (norm.scale, norm.shift)]
    attributes: dict[str, Any] = {"activation": int(norm.activates), "epsilon": norm.epsilon, "groups": norm.groups}
    last = editor.before(norm.last, "Transpose", norm.data, perm=CHANNELS_LAST)
    made = call(editor, norm.last, "GroupNorm", last, *weights, **attributes)
    take_place(editor.before(norm.last, "Transpose", made, perm=CHANNELS_FIRST), norm.last.outputs[0])


def _is_wide_convolution(node: ir.Node, shapes: Mapping[str, Shape]) -> bool:
    """Whether a node is a float16 convolution with its own weights, and input channels that suit tensor cores."""
    if not is_onnx(node, "Conv") or node.attributes.get_int("group", 1) != 1:
        return False
    data, weight, *bias = node.inputs
    if data is None or weight is None or not is_own(weight, 4) or not _are_images(data, tensor_of(weight), shapes):
        return False
    wide = tensor_of(weight).shape.numpy()[1] % CHANNELS_AT_ONCE == 0
    has_weights = not bias or bias[0] is None or known_weight(bias[0]) is not None
    return wide and has_weights and node.attributes.get_string("auto_pad", "NOTSET") == "NOTSET"


def _write_convolution(node: ir.Node, editor: Editor) -> None:
    """Replace a convolution by NhwcConv. Its bias becomes an Add: that takes half the time of cuDNN's bias with NHWC.

    Output channels are padded with zero weights to what tensor cores write at once, and sliced off afterwards.
    """
    data, weight, *bias = node.inputs
    assert weight is not None
    stored, sizes = tensor_of(weight), tensor_of(weight).shape.numpy()
    attributes: dict[str, Any] = {
        "dilations": node.attributes.get_ints("dilations", (1, 1)),
        "group": 1,
        "kernel_shape": sizes[2:],
        "pads": node.attributes.get_ints("pads", (0, 0, 0, 0)),
        "strides": node.attributes.get_ints("strides", (1, 1)),
    }
    last = editor.before(node, "Transpose", data, perm=CHANNELS_LAST)
    channels, missing = sizes[0], -sizes[0] % CHANNELS_AT_ONCE
    shape = (channels + missing, *sizes[2:], sizes[1])

    def padded(array: Array) -> Array:
        whole = np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)])
        last: Array = whole.transpose(CHANNELS_LAST)
        return last

    moved = editor.weight(computed(stored, shape, f"{weight.name}/last", padded))
    made = call(editor, node, "NhwcConv", last, moved, **attributes)
    if missing:
        made = editor.before(node, "Slice", made, *map(editor.numbers, (0, channels, 3)))
    if bias and bias[0] is not None:
        made = editor.before(node, "Add", made, bias[0])
    take_place(editor.before(node, "Transpose", made, perm=CHANNELS_FIRST), node.outputs[0])
