"""Pads transposed convolutions evenly on GPUs: cuDNN takes one number for both ends of an axis.

Others, as Keras' "same" with a kernel of 3 and a stride of 2 has them, ONNX Runtime leaves to the CPU. With the lesser
number at both ends the result is longer, and the rest is sliced off.
"""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.lowering.attention_nodes import LAST
from splitc.compiler.lowering.skip_norms import known_shape

# The first axis of an image that is padded.
FIRST = 2


def pad_evenly(node: ir.Node, editor: Editor) -> None:
    """Write the pads of a ConvTranspose as the same at both ends, in place, if they are known."""
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
