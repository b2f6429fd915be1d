"""Shapes of a graph's values: symbolic ones for the engines' files, bound ones (in numbers) for costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType

import onnx_ir as ir
import sympy

from splitc.compiler.graphs.optional import optional_inputs
from splitc.compiler.graphs.reads import all_nodes, has_subgraphs
from splitc.compiler.inference.carried import forget_inferred, free_changing_states, is_made_up
from splitc.compiler.inference.folding import fold_shapes, take_branches
from splitc.compiler.inference.symbolic import infer_shapes_and_types
from splitc.compiler.request.shapes import Shape
from splitc.runtime.arrays.array import Array

# The characters of the longest dimension that is parsed as an expression (by sympy, which onnx_ir depends on).
# A choice, against models that are damaged or made to harm. With 40 the plans of 11 models are the same.
LONGEST = 200


@dataclass(frozen=True)
class BoundShapes:
    """Bound shapes of values, by name.

    - `shapes`: the shapes. Sizes that depend on contents (NonZero) count as 1.
    - `uncertain`: the values with such sizes. `unknown`: their axes with such sizes.
    - `constants`: the results of shape arithmetic with these shapes.
    - `observed`: operators without a shape rule, which ONNX Runtime ran on generated inputs.
    - `mixed`: results of shape arithmetic of which only some entries are the same for all sizes: None for the others.
    - `ones`: the axes of a value that have one element with these sizes, but more with others.
    """

    shapes: Mapping[str, Shape]
    uncertain: frozenset[str]
    constants: Mapping[str, Array]
    observed: frozenset[str] = frozenset()
    unknown: Mapping[str, frozenset[int]] = field(default_factory=dict)
    mixed: Mapping[str, Sequence[int | None]] = field(default_factory=dict)
    ones: Mapping[str, frozenset[int]] = field(default_factory=dict)


def read_symbols(model: ir.Model) -> None:
    """Normalize the shapes of inputs and outputs, in place: a dimension like `?` or -1 is unknown.

    Each unknown size of an input gets its own symbol, so that inference can follow it.
    """
    count = itertools.count()
    is_readable = cache(_is_readable)  # the caches of all layers have the same few sizes
    for value in (*model.graph.inputs, *optional_inputs(model.graph)):
        if value.shape is not None:
            sizes = [size if is_readable(size) else f"unknown_{next(count)}" for size in value.shape]
            value.shape = ir.Shape(sizes)
    for value in model.graph.outputs:
        if value.shape is not None:
            value.shape = ir.Shape([size if is_readable(size) else None for size in value.shape])


def _is_readable(size: int | ir.SymbolicDim) -> bool:
    """Whether a size is a number, a name, or an expression, as exporters write them.

    Powers are refused: 9**9**9**9 would be computed for ever.
    """
    if isinstance(size, int):
        return size >= 0
    if size.value is None or len(size.value) > LONGEST or "**" in size.value:
        return False
    try:
        return size.free_symbols() is not None
    except ValueError:  # no expression
        return False


def sizes_of(shape: Iterable[int | ir.SymbolicDimProtocol]) -> list[int | str | None]:
    """A shape's sizes, as numbers or symbols; None for those that are not known."""
    return [size if isinstance(size, int) else size.value for size in shape]


def may_be_same(one: ir.Shape, other: ir.Shape | Shape) -> bool:
    """Whether shapes have as many axes, and none that is one number in one and another number in the other."""
    return len(one) == len(other) and all(
        a == b or not (isinstance(a, int) and isinstance(b, int)) for a, b in zip(one, other, strict=True)
    )


def numbers_or_names(shape: ir.ShapeProtocol | None) -> tuple[int | str, ...] | None:
    """A shape's sizes, as numbers or symbols; None unless all are known."""
    known = [] if shape is None else [size for size in sizes_of(shape) if size is not None]
    return None if shape is None or len(known) < len(shape) else tuple(known)


def symbols_in(size: int | ir.SymbolicDim) -> frozenset[str]:
    """The symbols in a size; none for a number, and for an expression of shape inference that can't be parsed."""
    if isinstance(size, int) or not _is_readable(size):
        return frozenset()
    return frozenset(map(str, size.free_symbols()))


def infer_shapes(model: ir.Model, folds: bool = False) -> frozenset[str]:
    """Infer the symbolic shape and type of every value from the inputs, in place. See `infer_shapes_and_types`.

    The file's own shapes are dropped first, since exporters write wrong ones. If inference fails, shapes stay unknown,
    which later passes allow for. An output without any inferred size keeps the file's shape. Others keep its symbols
    where inference knows no size.
    """
    declared = {value: value.shape for value in model.graph.outputs}
    for node in all_nodes(model.graph):
        for value in node.outputs:
            value.shape = None
    observed = infer_shapes_and_types(model, folds)
    while free_changing_states(model.graph):
        forget_inferred(model.graph)
        observed |= infer_shapes_and_types(model, folds)
    for value, shape in declared.items():
        made = value.shape
        if made is None or (shape is not None and len(shape) == len(made) and all(map(is_made_up, made))):
            value.shape = shape
        elif shape is not None and len(shape) == len(made):
            pairs = zip(made, shape, strict=True)
            # A number may be wrong where inference does not know one: it is of the inputs that were traced.
            value.shape = ir.Shape([own if is_made_up(size) and _is_name(own) else size for size, own in pairs])
    return observed


def _is_name(size: int | ir.SymbolicDim) -> bool:
    return not isinstance(size, int) and _is_readable(size)


def evaluate_size(size: ir.SymbolicDim, bindings: Mapping[str, int]) -> int | None:
    """The value of an expression, with numbers for its symbols; None if it has other symbols."""
    result = size.evaluate(bindings)
    return int(result) if isinstance(result, (int, sympy.Integer)) else None


def sizes_of_symbols(graph: ir.Graph, shapes: Mapping[str, Shape]) -> dict[str, int]:
    """The symbols of a graph's inputs, with their sizes in these shapes."""
    symbols: dict[str, int] = {}
    for value in graph.inputs:
        for size, number in zip(value.shape or (), shapes[value.name or ""], strict=False):
            # Some exporters write a number as a symbol: "4" is a dynamic length, unless its size is 4.
            if isinstance(size, ir.SymbolicDim) and size.value and size.value != str(number):
                symbols[size.value] = number
    return symbols


def reconcile(model: ir.Model, bound: BoundShapes) -> None:
    """Drop symbolic sizes that contradict the bound shapes, in place: inference is not always right.

    Engines rely on symbolic sizes, as do stages that read a size off another value.
    """
    bindings = sizes_of_symbols(model.graph, bound.shapes)

    @cache
    def agrees(size: int | ir.SymbolicDim, number: int) -> bool:
        if isinstance(size, int):
            return size == number
        if size.value is None or size.value in bindings:
            return bindings.get(size.value or "", number) == number
        return evaluate_size(size, bindings) in (number, None)

    for value in (value for node in model.graph for value in node.outputs):
        numbers = bound.shapes.get(value.name or "")
        if value.shape is None or numbers is None or value.name in bound.uncertain:
            continue
        if len(numbers) != len(value.shape):
            value.shape = None
            continue
        if not all(map(agrees, value.shape, numbers)):
            pairs = zip(value.shape, numbers, strict=True)
            value.shape = ir.Shape([size if agrees(size, number) else None for size, number in pairs])


def bind_shapes(
    model: ir.Model,
    inputs: Mapping[str, Shape],
    known: Mapping[str, Array | None] = MappingProxyType({}),
    defaults: bool = False,
) -> BoundShapes:
    """The shape of every value of the main graph, for inputs of these shapes.

    `known` are the contents of inputs that are lists of sizes. With `defaults`, those of optional inputs are used too:
    that suffices for costs, but requests may override them.
    """
    with bound_model(model, inputs, known, defaults) as (_, bound):
        return bound


@contextmanager
def bound_model(
    model: ir.Model,
    inputs: Mapping[str, Shape],
    known: Mapping[str, Array | None] = MappingProxyType({}),
    defaults: bool = False,
) -> Iterator[tuple[ir.Model, BoundShapes]]:
    """As `bind_shapes`; also yields a model whose values have these shapes, and the results of shape arithmetic."""
    with _scratch(model) as bound:
        yield bound, _bind(bound, inputs, known, defaults)


@contextmanager
def _scratch(model: ir.Model) -> Iterator[ir.Model]:
    """A model to bind shapes in: the model itself, whose values are restored afterwards.

    If it has subgraphs, a copy: an If is replaced by the branch that is taken.
    """
    if has_subgraphs(model.graph):
        yield model.clone()
        return
    graph = model.graph
    values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    states = [(value.shape, value.type, value.const_value, dict(value.metadata_props)) for value in values]
    try:
        yield model
    finally:
        for value, (shape, type_, tensor, properties) in zip(values, states, strict=True):
            value.shape, value.type = shape, type_
            if value.const_value is not tensor:  # setting it is slow
                value.const_value = tensor
            if properties or value.metadata_props:
                value.metadata_props.clear()
                value.metadata_props.update(properties)


def _bind(
    bound: ir.Model, inputs: Mapping[str, Shape], known: Mapping[str, Array | None], defaults: bool
) -> BoundShapes:
    """As `bind_shapes`, in place."""
    for value in optional_inputs(bound.graph):
        if value.const_value is not None:
            value.shape = ir.Shape(value.const_value.shape.numpy())
            value.const_value = value.const_value if defaults else None
    for value in bound.graph.inputs:
        value.shape = ir.Shape(inputs[value.name or ""])
        if (numbers := known.get(value.name or "")) is not None:
            value.const_value = ir.tensor(numbers, name=value.name)
    observed = infer_shapes(bound, folds=True)
    # Unless shapes were inferred in order, new shapes allow more folding, and vice versa.
    while fold_shapes(bound.graph) + take_branches(bound.graph) and not _is_known(bound.graph):
        observed |= infer_shapes(bound, folds=True)
    values = [*bound.graph.inputs, *(value for node in bound.graph for value in node.outputs)]
    named = {value.name: value for value in values if value.name}
    shapes = {name: value.shape for name, value in named.items() if value.shape is not None}
    return BoundShapes(  # a convolution of less data than its kernel has would have a negative size
        {name: tuple(max(size, 0) if isinstance(size, int) else 1 for size in shape) for name, shape in shapes.items()},
        frozenset(
            name
            for name, value in named.items()
            if not _has_sizes(value) and (value.uses() or value.is_graph_output())  # unread values don't matter
        ),
        {name: value.const_value.numpy() for name, value in named.items() if value.const_value is not None},
        observed,
        {
            name: frozenset(number for number, size in enumerate(shape) if not isinstance(size, int))
            for name, shape in shapes.items()
            if not shape.is_static()
        },
    )


def _is_known(graph: ir.Graph) -> bool:
    return all(_has_sizes(value) for node in graph for value in node.outputs)


def _has_sizes(value: ir.Value) -> bool:
    return value.shape is not None and value.shape.is_static()


def shape_of(value: ir.Value | None, shapes: Mapping[str, Shape] = MappingProxyType({})) -> Shape:
    """A weight's own shape, or the shape that `shapes` has for any other value; () if it is not known."""
    if value is None:
        return ()
    if value.const_value is not None:
        return tuple(value.const_value.shape.numpy())
    return shapes.get(value.name or "", ())


def tensor_bytes(value: ir.Value, shape: Shape | None) -> int:
    """Bytes of a value with a bound shape; 0 if its shape or type is not known, and for strings."""
    if shape is None or value.dtype is None or value.dtype == ir.DataType.STRING:
        return 0
    return math.ceil(math.prod(shape) * value.dtype.bitwidth / 8)


def fixed_size(size: int | ir.SymbolicDim | None) -> int | None:
    """A size that is a number, or that has one as its symbol; None for any other. Dynamic ones have been renamed."""
    return int(str(size)) if isinstance(size, int) or (size is not None and is_numbered(size)) else None


def is_numbered(size: int | ir.SymbolicDim) -> bool:
    """Whether a dimension's symbol is a number ("16"), as torch's exporter writes fixed dimensions."""
    return isinstance(size, ir.SymbolicDim) and size.value is not None and size.value.isdigit()
