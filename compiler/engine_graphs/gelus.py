"""Fuses Gelu with the bias before it, and gated Gelu (GEGLU, Shazeer, 2020), on GPUs in half precision.

ONNX Runtime fuses a bias with a Gelu in single precision. In half precision it leaves some forms unfused, which read
and write the data once more: on an H100, gated layers of two products take 1.2 times as long. On an H200 the gated
layers of SDXL's U-Net take 0.5 to 0.65 of the time that they take as exported, and 0.75 if only bias and Gelu are fused
(tests/benchmarks/fused_attention.py). A Gelu may be an operator, or decomposed (fusion/gelu.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from splitc.compiler.engine_graphs.gpu_functions import call
from splitc.compiler.fusion.gelu import find_by_erf
from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.lazy_tensors import JoinedTensor
from splitc.compiler.graphs.matching import (
    combined,
    constant_numbers,
    input_orders,
    is_onnx,
    is_own,
    made_by,
    tensor_of,
)
from splitc.compiler.graphs.origins import described, own_shape, planned_shape, take_place
from splitc.compiler.graphs.walks import producer_of
from splitc.compiler.nodes import MICROSOFT, known_tensor
from splitc.compiler.operators.gpu_kernels import HALVES
from splitc.compiler.request.shapes import Shape

GATED = "BiasSplitGelu"
# The columns of both halves together that the kernel of BiasSplitGelu supports (bias_split_gelu.cc of ONNX Runtime).
WIDTHS = (2560, 5120, 10240)
# The index of the axis of columns: values are [batch, tokens, columns].
ROWS = 2
BIASED = "BiasGelu"


@dataclass(frozen=True)
class _Half:
    """One half of a gated layer: the product of `data` and `weight`, and the `bias` that is added to it."""

    data: ir.Value
    weight: ir.Value
    bias: ir.Value


def fuse_gated_gelus(graph: ir.Graph, shapes: Mapping[str, Shape]) -> None:
    """Replace `left x Gelu(right)`, of two halves with biases, by BiasSplitGelu where it supports the width, in place.

    `shapes` are those of the model's values. Nodes without readers afterwards stay.
    """
    editor = Editor(graph)
    for node in list(graph):
        gelu = find_gelu(node)
        gated = None if gelu is None else combined(gelu[1], "Mul")
        if gelu is None or gated is None or not _are_halves(gated[0], gelu[0], shapes):
            continue
        left, product = gated
        reads = 2 if node.op_type == "Erf" else 1  # a decomposed Gelu reads its input twice, the operator once
        halves = _find_split(left, gelu[0], shapes) or _join(left, gelu[0], reads, producer_of(product), editor)
        if halves is not None:
            take_place(call(editor, producer_of(product), GATED, *halves), product)


def _find_split(left: ir.Value, right: ir.Value, shapes: Mapping[str, Shape]) -> tuple[ir.Value, ir.Value] | None:
    """The product and the bias whose sum is split into these two halves of columns; None for other values."""
    one, other = left.producer(), right.producer()
    if one is None or other is None or not (_splits(one, left, right) or _slices(one, other)):
        return None
    total = one.inputs[0]
    others = [] if total is None else [node for node, _ in total.uses() if node not in (one, other)]
    if total is None or total.is_graph_output() or any(node.op_type != "Shape" for node in others):
        return None
    if planned_shape(total, shapes)[ROWS:] != (2 * planned_shape(left, shapes)[ROWS],):
        return None
    biased = find_bias(total)
    return biased if biased is not None and _width(biased[1]) in WIDTHS else None


def _splits(node: ir.Node, left: ir.Value, right: ir.Value) -> bool:
    """Whether a node is a Split of columns into these two values."""
    by_columns = is_onnx(node, "Split") and node.attributes.get_int("axis", 0) in (-1, ROWS)
    return by_columns and list(node.outputs) == [left, right]


def _slices(one: ir.Node, other: ir.Node) -> bool:
    """Whether two nodes are Slices of one value's columns, [:middle] and [middle:], as of torch's older exporter."""
    if not all(is_onnx(node, "Slice") and len(node.inputs) == 4 for node in (one, other)):
        return False
    (data, start, end, axis), (same, middle, _, also) = one.inputs, other.inputs
    from_start = constant_numbers(start) == [0] and end is not None and end is middle
    return data is same and from_start and all(constant_numbers(value) in ([-1], [ROWS]) for value in (axis, also))


def _join(
    left: ir.Value, right: ir.Value, reads: int, before: ir.Node, editor: Editor
) -> tuple[ir.Value, ir.Value] | None:
    """One product with the weights of both halves, and one bias; None if the halves can't be joined.

    `reads` is how often the Gelu reads its half.
    """
    one, other = _find_half(left, 1), _find_half(right, reads)
    if one is None or other is None or one.data is not other.data:
        return None
    if _width(one.bias) != _width(other.bias) or 2 * _width(one.bias) not in WIDTHS:
        return None
    parts = [tensor_of(one.weight), tensor_of(other.weight)]
    weight = editor.weight(JoinedTensor(parts, 1, f"{one.weight.name}+{other.weight.name}"))
    bias = np.concatenate([tensor_of(one.bias).numpy(), tensor_of(other.bias).numpy()])
    return editor.before(before, "MatMul", one.data, weight), editor.constant(bias)


def _find_half(total: ir.Value, reads: int) -> _Half | None:
    """The half that a sum of a product and a bias is; None unless it has exactly `reads` readers."""
    biased = find_bias(total)
    product = None if biased is None else made_by(biased[0], "MatMul")
    if biased is None or product is None:
        return None
    data, weight = product.inputs
    if data is None or weight is None or not is_own(weight, 2) or len(total.uses()) != reads or total.is_graph_output():
        return None
    if known_tensor(biased[1]) is None:
        return None
    return _Half(data, weight, biased[1])


def _width(bias: ir.Value) -> int:
    """The number of columns on this rank: fewer than the model's where they are sharded."""
    return tensor_of(bias).size


def _are_halves(left: ir.Value, right: ir.Value, shapes: Mapping[str, Shape]) -> bool:
    """Whether two float16 values are [batch, tokens, columns] of the same shape: the kernel takes no other type."""
    one, other = (planned_shape(value, shapes) for value in (left, right))
    return len(one) == ROWS + 1 and one == other and described(left).dtype == ir.DataType.FLOAT16


def fuse_bias_gelus(graph: ir.Graph) -> None:
    """Fuse each Gelu in half precision with the bias added before it, in place. Nodes without readers stay."""
    editor = Editor(graph)
    for node in list(graph):
        gelu = find_gelu(node)
        biased = None if gelu is None else find_bias(gelu[0])
        if gelu is None or biased is None:
            continue
        data, bias = biased
        made = editor.before(node, BIASED, data, bias, domain=MICROSOFT)
        graph.opset_imports.setdefault(MICROSOFT, 1)
        take_place(made, gelu[1])


def find_gelu(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """The input and the output of an exact Gelu that is this node, or is decomposed around this Erf; else None."""
    exact = node.attributes.get_string("approximate", "none") == "none"
    if node.op_type != "Gelu" or node.domain not in ("", MICROSOFT) or not exact or node.inputs[0] is None:
        return find_by_erf(node)
    return node.inputs[0], node.outputs[0]


def find_bias(total: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """The data [..., n] and the bias [n] whose sum in half precision a value is; None for other values."""
    node = made_by(total, "Add")
    if node is None or described(total).dtype not in HALVES:
        return None
    for data, bias in input_orders(node):
        if data is None or bias is None or bias.const_value is None or data.const_value is not None:
            continue
        own, shape = bias.const_value.shape.numpy(), own_shape(data)
        if len(own) == 1 and own[0] > 1 and shape is not None and len(shape) > 1 and shape[-1] == own[0]:
            return data, bias
    return None
