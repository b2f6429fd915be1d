"""Writes convolutions for ONNX Runtime's CUDA provider so that cuDNN has a plan for them, and a fast one.

What cuDNN's heuristics have no plan for beyond this, the runtime finds (runtime/engines/convolution_plans.py).
"""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.engine_graphs.attention_nodes import LAST
from splitc.compiler.engine_graphs.skip_norms import known_shape
from splitc.compiler.graphs.editor import Editor, describe
from splitc.compiler.graphs.matching import is_onnx
from splitc.compiler.graphs.origins import described, own_shape
from splitc.compiler.operators.gpu_kernels import HALVES

CONVOLUTIONS = ("Conv", "ConvTranspose", "NhwcConv", "NhwcFusedConv")
# The first axis that a kernel moves along, of an image and of a weight.
FIRST = 2
# The most elements that a kernel over one axis spans for which cuDNN's heuristics have a plan in half precision.
WIDEST = 30


def convolves(node: ir.Node) -> bool:
    """Whether ONNX Runtime's CUDA provider runs a node with cuDNN, which plans for one shape at a time."""
    return node.op_type in CONVOLUTIONS


def has_no_plan(node: ir.Node) -> bool:
    """Whether cuDNN's heuristics may have no plan for a convolution of halves over one axis, as it is wide.

    Of 1,087 on an H200 (ONNX Runtime 1.31) 124 had none, 122 of which span more than 30 elements: the positions of
    wav2vec 2.0, with 16 groups and a kernel of 128, or the dilations of audio codecs. In single precision all had one:
    that of wav2vec takes 0.8 ms, and what ONNX Runtime finds for halves by trying all plans 1.9. Depthwise ones have
    plans.
    """
    if not is_onnx(node, "Conv", "ConvTranspose"):
        return False
    data, shape = node.inputs[0], _one_axis(node)
    if data is None or described(data).dtype not in HALVES or shape is None or _is_depthwise(node, shape):
        return False
    kernel, (dilation,) = shape[FIRST], node.attributes.get_ints("dilations", (1,))
    return isinstance(kernel, int) and (kernel - 1) * dilation + 1 > WIDEST


def _one_axis(node: ir.Node) -> tuple[int | str, ...] | None:
    """The shape of the weight of a convolution over one axis; None for others."""
    weight = node.inputs[1]
    shape = None if weight is None else known_shape(weight)
    return shape if shape is not None and len(shape) == FIRST + 1 else None


def _is_depthwise(node: ir.Node, shape: tuple[int | str, ...]) -> bool:
    return shape[:FIRST] == (node.attributes.get_int("group", 1), 1)


def add_axis(node: ir.Node, editor: Editor) -> None:
    """Compute a depthwise convolution over one axis as one over the last of two, in place.

    ONNX Runtime adds the other axis behind it, for which cuDNN's heuristics name a slow plan: 1,024 channels, a kernel
    of 31 and 500 frames, as in encoders of speech, take 4.5 ms on an H200, and so 0.02.
    """
    shape = _one_axis(node)
    if shape is None or not _is_depthwise(node, shape):
        return
    axes, attributes = editor.lists("Unsqueeze", axes=[FIRST])
    made, name = node.outputs[0], node.outputs[0].name
    for number, value in enumerate(node.inputs[:2]):
        assert value is not None
        wide = editor.before(node, "Unsqueeze", value, *axes, **attributes)
        describe(wide, f"{name}/wide{number}", described(value).dtype, _with_axis(own_shape(value)))
        node.replace_input_with(number, wide)
    for key in ("kernel_shape", "strides", "dilations"):
        if (given := node.attributes.get_ints(key)) is not None:
            node.attributes[key] = ir.AttrInt64s(key, [1, *given])
    if (pads := node.attributes.get_ints("pads")) is not None:
        node.attributes["pads"] = ir.AttrInt64s("pads", [0, pads[0], 0, pads[1]])
    editor.wrap(made, "Squeeze", [made, *axes], "wide", **attributes)
    made.shape = None


def _with_axis(shape: ir.Shape | None) -> ir.Shape | None:
    return None if shape is None else ir.Shape([*shape[:FIRST], 1, *shape[FIRST:]])


def pad_evenly(node: ir.Node, editor: Editor) -> None:
    """Write the pads of a ConvTranspose as the same at both ends, in place, if they are known.

    cuDNN takes one number for both ends of an axis. Others, as Keras' "same" with a kernel of 3 and a stride of 2 has
    them, ONNX Runtime leaves to the CPU. With the lesser number at both ends the result is longer, and the rest is
    sliced off.
    """
    befores, afters = _pads(node)
    evens = [min(pair) for pair in zip(befores, afters, strict=True)]
    if not evens:
        return
    for name in ("auto_pad", "output_shape"):
        node.attributes.pop(name, None)
    node.attributes["pads"] = ir.AttrInt64s("pads", [*evens, *evens])
    if befores == afters:
        return
    starts = [before - even for before, even in zip(befores, evens, strict=True)]
    ends = [even - after or LAST for after, even in zip(afters, evens, strict=True)]
    made, axes = node.outputs[0], range(FIRST, FIRST + len(evens))
    bounds, attributes = editor.lists("Slice", starts=starts, ends=ends, axes=axes)
    editor.wrap(made, "Slice", [made, *bounds], "longer", **attributes)
    made.shape = None


def _pads(node: ir.Node) -> tuple[list[int], list[int]]:
    """The numbers before and after each axis; none if they depend on sizes that are not known.

    See ComputeTransposePadAndOutputShape in ONNX Runtime's core/providers/cpu/nn/conv_transpose_attributes.h.
    """
    given = node.attributes
    kind, pads = given.get_string("auto_pad", "NOTSET"), list(given.get_ints("pads", ()))
    if kind == "VALID" or (kind == "NOTSET" and "output_shape" not in given):
        return pads[: len(pads) // 2], pads[len(pads) // 2 :]
    totals = _totals(node)
    lesser, greater = [total // 2 for total in totals], [total - total // 2 for total in totals]
    return (lesser, greater) if kind == "SAME_UPPER" else (greater, lesser)


def _totals(node: ir.Node) -> list[int]:
    """How much is cut off of each axis, at both ends together, where the result's sizes decide that."""
    given = node.attributes
    kernel = given.get_ints("kernel_shape", _spatial(node.inputs[1]))
    ones, zeros = [1] * len(kernel), [0] * len(kernel)
    strides, dilations = given.get_ints("strides", ones), given.get_ints("dilations", ones)
    wanted = given.get_ints("output_shape", ())[-len(kernel) :]
    # If no sizes are given, the result is as long as its input times the stride, and any length gives the same total.
    lengths = _spatial(node.inputs[0]) if wanted else zeros
    if len(lengths) != len(kernel):
        return []
    axes = zip(
        lengths, strides, kernel, dilations, given.get_ints("output_padding", zeros), wanted or zeros, strict=True
    )
    return [
        max(0, (length - 1) * stride + (size - 1) * dilation + 1 + more - own)
        for length, stride, size, dilation, more, own in axes
    ]


def _spatial(value: ir.Value | None) -> list[int]:
    """The sizes of an image or a kernel; none unless all are numbers."""
    sizes = list((known_shape(value) or ())[FIRST:]) if value is not None else []
    numbers = [size for size in sizes if isinstance(size, int)]
    return numbers if numbers == sizes else []
