"""Nodes that ONNX Runtime fuses into a convolution: padding before it, and what follows it channel by channel."""

from __future__ import annotations

from collections.abc import Container, Mapping

import numpy as np
import onnx_ir as ir

from splitc.compiler.execution.liveness import Nodes, Reads

# What a convolution's kernel can apply to its results (core/optimizer/conv_activation_fusion.cc).
ACTIVATIONS = ("Relu", "Sigmoid", "Tanh", "LeakyRelu", "HardSigmoid", "HardSwish", "Clip")
PADDED = ("Conv", "AveragePool", "MaxPool")


def find_parts(nodes: Nodes) -> dict[ir.Value, ir.Value]:
    """The results of nodes that are fused into a convolution or a pool, each with the value that replaces it.

    Batch norms, scales and offsets by channel are folded into the weights, and an activation comes last
    (conv_*_fusion.cc in core/optimizer). Zero padding becomes an attribute (pad_fusion.cc). The values between must
    have no other readers.
    """
    if not any(node.op_type in PADDED for node in nodes.order):
        return {}
    made = {value for node in nodes.order for value in node.outputs}
    parts: dict[ir.Value, ir.Value] = {}
    for node in nodes.order:
        if node.op_type == "Conv":
            _follow(node, nodes, parts)
        elif node.op_type == "Pad" and _adds_zeros(node, nodes.reads, made) and node.inputs[0] is not None:
            after = nodes.only_reader(node.outputs[0])
            if after is not None and after.op_type in PADDED:
                parts[node.outputs[0]] = node.inputs[0]
    return parts


def _follow(convolution: ir.Node, nodes: Nodes, parts: dict[ir.Value, ir.Value]) -> None:
    value = convolution.outputs[0]
    while (after := nodes.only_reader(value)) is not None and not after.domain:
        ends = after.op_type in ACTIVATIONS and after.inputs[0] is value
        if not ends and not _is_by_channel(after, value, convolution):
            return
        value = after.outputs[0]
        parts[value] = convolution.outputs[0]
        if ends:
            return


def _is_by_channel(node: ir.Node, data: ir.Value, convolution: ir.Node) -> bool:
    """Whether a node scales or offsets each channel of `data` by a stored number."""
    others = [value for value in node.inputs if value is not data]
    if any(value is None or value.const_value is None for value in others):
        return False
    if node.op_type == "BatchNormalization":
        return len(node.outputs) == 1
    kernel = convolution.inputs[1].shape if convolution.inputs[1] is not None else None
    if node.op_type not in ("Add", "Mul") or len(others) != 1 or others[0] is None or kernel is None:
        return False
    given = others[0].shape
    sizes = list(given.numpy()) if given is not None else []
    is_number = node.op_type == "Mul" and len(sizes) == 0
    by_channel = len(sizes) >= len(kernel) - 1 and sizes[-len(kernel) + 1 :] == [kernel[0], *[1] * (len(kernel) - 2)]
    return is_number or (by_channel and set(sizes[: -len(kernel) + 1]) <= {1})


def _adds_zeros(pad: ir.Node, reads: Reads, made: Container[ir.Value]) -> bool:
    """Whether a Pad adds zeros, and none to the channels. Sizes that were folded are assumed to add none."""
    if pad.attributes.get_string("mode", "constant") != "constant" or len(pad.inputs) < 2:
        return False
    if any(value in made or value.is_graph_input() for value in list(reads(pad))[1:]) or any(pad.inputs[3:]):
        return False
    sizes, filler = (value.const_value if value is not None else None for value in (*pad.inputs, None)[1:3])
    if filler is not None and filler.numpy().any():
        return False
    by_axis = sizes.numpy().reshape(2, -1) if sizes is not None else np.zeros((2, 2))
    return bool((by_axis >= 0).all()) and not by_axis[:, :2].any()


def resolve(same: Mapping[ir.Value, ir.Value], value: ir.Value) -> ir.Value:
    """The value that finally replaces a value."""
    while value in same:
        value = same[value]
    return value
