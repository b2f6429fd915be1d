"""Runs small graphs of bfloat16 in float32: ONNX Runtime's CPU provider has hardly any kernel for bfloat16.

Shapes are the same, and numbers are more exact.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.frontend.origins import put_behind
from splitc.runtime.arrays.array import Array

NARROW, WIDE = ir.DataType.BFLOAT16, ir.DataType.FLOAT
# The attributes that name the type of a result.
OF_TYPES = ("to", "dtype", "output_dtype")


def wide_type(kind: ir.TypeProtocol | None) -> ir.TypeProtocol | None:
    """The type that stands for a tensor's type."""
    return ir.TensorType(WIDE) if kind == ir.TensorType(NARROW) else kind


def wide_array(array: Array) -> Array:
    """The array, in float32 if it is bfloat16."""
    return array.astype(np.float32) if array.dtype == NARROW.numpy() else array


def wide_attribute(attribute: ir.Attr) -> ir.Attr:
    """The attribute with float32 as its value, or as its tensor's type, in place of bfloat16."""
    if attribute.name in OF_TYPES and attribute.value == NARROW:
        return ir.AttrInt64(attribute.name, WIDE)
    if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == NARROW:
        return ir.AttrTensor(attribute.name, ir.Tensor(wide_array(attribute.as_tensor().numpy())))
    return attribute


def cast_outside(graph: ir.Graph, narrow: Collection[str]) -> None:
    """Give inputs and outputs with these names, which are float32, the type bfloat16, by casts, in place."""
    for value in [value for value in graph.inputs if value.name in narrow]:
        cast = ir.node("Cast", [value], {"to": WIDE})
        cast.outputs[0].name, cast.outputs[0].type = f"{value.name}/wide", value.type
        graph.insert_before(graph[0], cast)
        put_behind(cast, value)
        value.type = ir.TensorType(NARROW)
    for value in [value for value in graph.outputs if value.name in narrow]:
        Editor(graph).wrap(value, "Cast", [value], "wide", dtype=NARROW, to=NARROW)


def use_wide_types(graph: ir.Graph) -> None:
    """Replace bfloat16 by float32 in a graph without subgraphs, in place."""
    for node in graph:
        for attribute in [*node.attributes.values()]:
            node.attributes.add(wide_attribute(attribute))
    for value in graph.initializers.values():
        if (tensor := value.const_value) is not None and tensor.dtype == NARROW:
            value.const_value = ir.Tensor(wide_array(tensor.numpy()), name=value.name)
    for value in (*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)):
        value.type = wide_type(value.type)
