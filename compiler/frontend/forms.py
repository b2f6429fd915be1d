"""Run a shape rule once for each form of a node: nodes that agree in all that a rule reads have the same outputs.

A model of equal blocks has about as many forms as one block has nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext

from splitc.compiler.frontend.folding import LONGEST
from splitc.compiler.frontend.node_key import node_key
from splitc.compiler.frontend.observation import MOST_SIZES

# The library trusts the shapes of these nodes' outputs less.
_CONTROL_FLOW = ("If", "Loop", "Scan")

Rule = Callable[[Any, ir.Node], None]


@dataclass(frozen=True)
class _Output:
    """What a rule has set of an output. `numbers` are the entries of a shape vector, `tensor` if all are known."""

    shape: ir.Shape | None
    type: ir.TypeProtocol | None
    numbers: list[int | ir.SymbolicDim] | None
    tensor: ir.TensorProtocol | None


@dataclass(frozen=True)
class _Seen:
    """A value's shape, type and constant when it got its number. Values with equal numbers are the same to a rule."""

    shape: ir.Shape | None
    type: ir.TypeProtocol | None
    tensor: ir.TensorProtocol | None
    number: int


@dataclass(frozen=True)
class _Run:
    """One run of the inference so far: the outputs of each form, and the number of each value."""

    outputs: dict[Hashable, list[_Output]] = field(default_factory=dict)
    seen: dict[ir.Value, _Seen] = field(default_factory=dict)
    numbers: dict[Hashable, int] = field(default_factory=dict)


_runs: WeakKeyDictionary[ShapeInferenceContext, _Run] = WeakKeyDictionary()
# What rules read of constants, which do not change.
_contents: WeakKeyDictionary[ir.TensorProtocol, Hashable] = WeakKeyDictionary()
_repeated: ContextVar[set[ir.Node]] = ContextVar("splitc.repeated")


@contextmanager
def repetitions() -> Iterator[set[ir.Node]]:
    """Collect the nodes for which no rule is run, since they have the form of another one."""
    nodes: set[ir.Node] = set()
    token = _repeated.set(nodes)
    try:
        yield nodes
    finally:
        _repeated.reset(token)


def once_a_form(rule: Rule) -> Rule:
    """The rule, which runs once for each form in a run of the inference.

    A node for which it creates a symbol, or relates two, is not reused: each node needs symbols of its own.
    """

    def infer(context: ShapeInferenceContext, node: ir.Node) -> None:
        run = _runs.get(context)
        if run is None:
            run = _runs[context] = _Run()
        if (form := _form(run, context, node)) is None:
            rule(context, node)
            return
        if (known := run.outputs.get(form)) is not None:
            _set(context, node, known)
            _repeated.get().add(node)
            return
        before = _symbols(context)
        rule(context, node)
        if _symbols(context) == before:
            run.outputs[form] = [
                _Output(v.shape, v.type, context.get_symbolic_value(v), v.const_value) for v in node.outputs
            ]

    return infer


def _set(context: ShapeInferenceContext, node: ir.Node, outputs: list[_Output]) -> None:
    for value, made in zip(node.outputs, outputs, strict=True):
        value.shape, value.type = made.shape, made.type
        if made.tensor is not None:  # to make one of numbers takes ten times as long
            value.const_value = ir.Tensor(made.tensor.numpy(), made.tensor.dtype, name=value.name)
        if made.numbers is not None:
            context.set_symbolic_value(value, made.numbers)


def _symbols(context: ShapeInferenceContext) -> tuple[int, int, int]:
    """The numbers of symbols and of relations between symbols so far."""
    names, bounds = context.generated_dim_names, context.symbolic_upper_bounds
    return len(names), len(context.symbolic_equalities), len(bounds)


def _form(run: _Run, context: ShapeInferenceContext, node: ir.Node) -> Hashable:
    """A key that is equal for nodes of one form; None for a node that is compared with no other."""
    if (key := node_key(node)) is None:
        return None
    for value in node.outputs:
        if value.shape is not None or value.const_value is not None:
            return None
    return (
        key,
        node.version,
        len(context.symbolic_equalities),
        tuple([None if value is None else _number(run, context, value) for value in node.inputs]),
        tuple([(_type(value), bool(value.name)) for value in node.outputs]),
    )


def _number(run: _Run, context: ShapeInferenceContext, value: ir.Value) -> int:
    """A number for all that a rule reads of an input."""
    shape, type_, tensor = value.shape, value.type, value.const_value
    seen = run.seen.get(value)
    if seen is not None and seen.shape is shape and seen.type is type_ and seen.tensor is tensor:
        return seen.number
    producer = value.producer()
    numbers = context.get_symbolic_value(value) if tensor is None else None
    content = (
        None if shape is None else shape.dims,
        _type(value),
        None if numbers is None else tuple(numbers),
        None if tensor is None else _contents.get(tensor) or _content(tensor),
        producer is not None and producer.op_type in _CONTROL_FLOW,
    )
    number = run.numbers.setdefault(content, len(run.numbers))
    run.seen[value] = _Seen(shape, type_, tensor, number)
    return number


def _type(value: ir.Value) -> Any:
    """A value's type; for a tensor its data type, which is hashed faster."""
    return value.dtype if type(value.type) is ir.TensorType else value.type


def _content(tensor: ir.TensorProtocol) -> Hashable:
    """A constant's type, sizes and, if it is short, elements."""
    whole = tensor.dtype.is_integer() or tensor.dtype == ir.DataType.BOOL
    is_read = tensor.size <= LONGEST if whole else tensor.size <= MOST_SIZES and tensor.dtype.is_floating_point()
    content = _contents[tensor] = tensor.dtype, tuple(tensor.shape), tensor.tobytes() if is_read else b""
    return content
