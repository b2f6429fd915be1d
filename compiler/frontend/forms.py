"""Run a shape rule once for each form of a node: nodes that are alike in all that a rule reads have outputs alike.

A model of equal blocks has about as many forms as one block has nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext

# The most elements of a constant that a rule reads: lists of sizes, and of scales. Longer ones are data.
LONGEST, LONGEST_SCALES = 1024, 64
# The attributes that are compared by their values. A node with any other has a form of its own.
_COMPARED = (
    ir.AttributeType.INT,
    ir.AttributeType.INTS,
    ir.AttributeType.FLOAT,
    ir.AttributeType.FLOATS,
    ir.AttributeType.STRING,
    ir.AttributeType.STRINGS,
)
# What makes shapes that the library trusts less.
_CONTROL_FLOW = ("If", "Loop", "Scan")

Rule = Callable[[Any, ir.Node], None]


@dataclass(frozen=True)
class _Output:
    """What a rule has set of an output. `numbers` are its elements, if it is a list of sizes."""

    shape: ir.Shape | None
    type: ir.TypeProtocol | None
    numbers: list[int | ir.SymbolicDim] | None


# The outputs of each form that a run of the inference has met.
_met: WeakKeyDictionary[ShapeInferenceContext, dict[Hashable, list[_Output]]] = WeakKeyDictionary()


def once_a_form(rule: Rule) -> Rule:
    """The rule, which runs once for each form in a run of the inference.

    A node for which it makes up a symbol, or relates two, is no pattern for others: each has symbols of its own.
    """

    def infer(context: ShapeInferenceContext, node: ir.Node) -> None:
        if (form := _form(context, node)) is None:
            rule(context, node)
            return
        met = _met.setdefault(context, {})
        if (known := met.get(form)) is not None:
            _set(context, node, known)
            return
        before = _symbols(context)
        rule(context, node)
        if _symbols(context) == before:
            met[form] = [_Output(v.shape, v.type, context.get_symbolic_value(v)) for v in node.outputs]

    return infer


def _set(context: ShapeInferenceContext, node: ir.Node, outputs: list[_Output]) -> None:
    for value, made in zip(node.outputs, outputs, strict=True):
        value.shape, value.type = made.shape, made.type
        if made.numbers is not None:
            context.set_symbolic_value(value, made.numbers)


def _symbols(context: ShapeInferenceContext) -> tuple[int, int, int]:
    """How many symbols, and relations between symbols, there are."""
    names, bounds = context.generated_dim_names, context.symbolic_upper_bounds
    return len(names), len(context.symbolic_equalities), len(bounds)


def _form(context: ShapeInferenceContext, node: ir.Node) -> Hashable:
    """A key that is equal for nodes of one form; None for a node that has its own."""
    attributes = node.attributes.values()
    if any(each.type not in _COMPARED or each.is_ref() for each in attributes):
        return None
    if any(value.shape is not None or value.const_value is not None for value in node.outputs):
        return None
    return (
        node.op_identifier(),
        node.version,
        context.get_opset_version(node.domain),
        len(context.symbolic_equalities),
        tuple([(each.name, each.type, each.value) for each in attributes]),
        tuple([None if value is None else _seen(context, value) for value in node.inputs]),
        tuple([(_type(value), bool(value.name)) for value in node.outputs]),
    )


def _seen(context: ShapeInferenceContext, value: ir.Value) -> Hashable:
    """What a rule sees of an input."""
    tensor, producer = value.const_value, value.producer()
    numbers = context.get_symbolic_value(value) if tensor is None else None
    return (
        None if value.shape is None else value.shape.dims,
        _type(value),
        None if numbers is None else tuple(numbers),
        None if tensor is None else _content(tensor),
        producer is not None and producer.op_type in _CONTROL_FLOW,
    )


def _type(value: ir.Value) -> Any:
    """A value's type: of a tensor the data type, whose hash is quicker."""
    return value.dtype if type(value.type) is ir.TensorType else value.type


def _content(tensor: ir.TensorProtocol) -> Hashable:
    """A constant's type, sizes and, if it is short, elements."""
    whole = tensor.dtype.is_integer() or tensor.dtype == ir.DataType.BOOL
    is_read = tensor.size <= LONGEST if whole else tensor.size <= LONGEST_SCALES and tensor.dtype.is_floating_point()
    return tensor.dtype, tuple(tensor.shape), tensor.tobytes() if is_read else b""
