"""Shapes of a graph's values: symbolic ones for the files that are written, bound ones for costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy.typing as npt
import onnx_ir as ir
import sympy

from splitc.compiler.frontend.asked_shapes import Shape
from splitc.compiler.frontend.folding import fold_shapes, take_branches
from splitc.compiler.frontend.inference import Inference, infer_shapes_and_types
from splitc.compiler.frontend.optional import optional_inputs
from splitc.compiler.frontend.reads import all_nodes, has_subgraphs
from splitc.runtime.errors import MisuseError
from splitc.runtime.units import format_shape

# Default sizes of dynamic dimensions: of an input's first one (usually the batch), and of any other.
DEFAULT_BATCH, DEFAULT_LENGTH = 1, 16
# Characters of the longest name of a dimension that is taken for a name or a sum of names.
LONGEST = 200


@dataclass(frozen=True)
class BoundShapes:
    """Bound shapes of values by name. A size that depends on data (NonZero) counts as 1; its value is `uncertain`.

    `constants` are the results of shape arithmetic with these shapes. `observed` are the operators without a shape
    rule, which ONNX Runtime ran on made-up inputs.
    """

    shapes: Mapping[str, Shape]
    uncertain: frozenset[str]
    constants: Mapping[str, npt.NDArray[Any]]
    observed: frozenset[str] = frozenset()


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
    """Whether a size is a number, a name, or a sum or the like of such, as exporters write them.

    Powers are no sizes: to compute 9**9**9**9 takes for ever.
    """
    if isinstance(size, int):
        return size >= 0
    if size.value is None or len(size.value) > LONGEST or "**" in size.value:
        return False
    try:
        return size.free_symbols() is not None
    except ValueError:  # no expression
        return False


def infer_shapes(model: ir.Model) -> Inference:
    """Infer every value's symbolic shape and type from the inputs, in place.

    The file's own shapes are dropped first, since exporters write wrong ones. If inference fails, shapes stay unknown,
    which later passes allow for; only an output then keeps the file's shape.
    """
    declared = {value: value.shape for value in model.graph.outputs}
    for node in all_nodes(model.graph):
        for value in node.outputs:
            value.shape = None
    found = infer_shapes_and_types(model)
    for value, shape in declared.items():
        if value.shape is None:
            value.shape = shape
    return found


def input_shapes(
    model: ir.Model,
    given: Mapping[str, Shape],
    past: frozenset[str],
    stated: Mapping[str, Sequence[int | None]] = MappingProxyType({}),
) -> dict[str, Shape]:
    """Bind every dimension of every input to a number, from the shapes that the user gave.

    Dimensions that are not given are bound by symbols that they share with given ones, or else with those that are
    `stated`, of inputs that are there. A symbol in `past` (the length
    of a cache) is 0. Any other dimension gets the largest size given, of first dimensions for a first dimension and of
    others for any other, since exporters give one length several symbols; or else a default. Raises MisuseError for a
    shape of an unknown input, or one that contradicts the model or another one.
    """
    inputs = {value.name or "": value for value in model.graph.inputs}
    for name, shape in given.items():
        if name not in inputs:
            raise MisuseError(f"--shapes names '{name}', and the model has no such input: it has {', '.join(inputs)}")
        declared = inputs[name].shape
        if declared is None:
            continue
        same_rank = len(declared) == len(shape)
        if not same_rank or any(
            isinstance(want, int) and want != size for want, size in zip(declared, shape, strict=True)
        ):
            want = format_shape([size if isinstance(size, int) else size.value for size in declared])
            raise MisuseError(f"--shapes gives '{name}' as {format_shape(shape)}, and the model takes {want}")
    bindings = {**_stated_symbols(inputs, stated, past), **_bind_symbols(inputs, given)}
    free = {
        (axis > 0, size)
        for name, shape in given.items()
        for axis, (declared, size) in enumerate(zip(inputs[name].shape or (), shape, strict=False))
        if isinstance(declared, ir.SymbolicDim) and declared.value not in past
    }
    batch = max((size for later, size in free if not later), default=DEFAULT_BATCH)
    length = max((size for later, size in free if later), default=DEFAULT_LENGTH)

    @cache  # the caches of all layers have the same few sizes
    def bind(size: int | ir.SymbolicDim, is_first: bool) -> int:
        return _bind_size(size, bindings, past, batch if is_first else length)

    unbound = {name: value.shape or () for name, value in inputs.items() if name not in given}
    found = {name: tuple(bind(size, axis == 0) for axis, size in enumerate(shape)) for name, shape in unbound.items()}
    return {**given, **found}


def _bind_symbols(inputs: Mapping[str, ir.Value], given: Mapping[str, Shape]) -> dict[str, int]:
    """The sizes of symbols in the given shapes. A 1 gives way to another size, since it may be broadcast to that.

    Raises MisuseError for a symbol with two sizes.
    """
    found: dict[str, tuple[int, str]] = {}
    for name, shape in given.items():
        for symbol, size in zip(inputs[name].shape or (), shape, strict=False):
            if isinstance(symbol, int) or not symbol.value:
                continue
            known, other = found.get(symbol.value, (1, name))
            if 1 not in (known, size) and known != size:
                raise MisuseError(
                    f"the shapes contradict: the model's size '{symbol.value}' is {known} in '{other}' and {size} in "
                    f"'{name}'"
                )
            if known == 1:
                found[symbol.value] = (size, name)
    return {symbol: size for symbol, (size, _) in found.items()}


def _stated_symbols(
    inputs: Mapping[str, ir.Value], stated: Mapping[str, Sequence[int | None]], past: frozenset[str]
) -> dict[str, int]:
    """The sizes of symbols that are stated, but for the length of a cache."""
    pairs = [
        (symbol.value, size)
        for name, sizes in stated.items()
        if name in inputs
        for symbol, size in zip(inputs[name].shape or (), sizes, strict=False)
        if isinstance(symbol, ir.SymbolicDim)
    ]
    return {symbol: size for symbol, size in pairs if symbol is not None and symbol not in past and size is not None}


def _bind_size(size: int | ir.SymbolicDim, bindings: Mapping[str, int], past: frozenset[str], default: int) -> int:
    if isinstance(size, int):
        return size
    if size.value is None or size.value in bindings:
        return bindings.get(size.value or "", default)
    # A dimension may be an expression, "past_length + sequence_length", or look like one: "batch-size".
    known = {name: bindings.get(name, 0 if name in past else default) for name in size.free_symbols()}
    result = evaluate_size(size, known)
    # A name such as "batch-size" is no expression, and its result no size.
    return default if result is None or (result <= 0 and size.value not in past) else result


def evaluate_size(size: ir.SymbolicDim, bindings: Mapping[str, int]) -> int | None:
    """The value of an expression with these symbols; None if it has others."""
    result = size.evaluate(bindings)
    return int(result) if isinstance(result, (int, sympy.Integer)) else None


def reconcile(model: ir.Model, bound: BoundShapes) -> None:
    """Drop symbolic sizes that contradict the bound shapes, in place, since inference is not always right.

    Engines rely on these sizes, and so do stages that read a size off another value.
    """
    bindings: dict[str, int] = {}
    for value in model.graph.inputs:
        for size, number in zip(value.shape or (), bound.shapes[value.name or ""], strict=False):
            if isinstance(size, ir.SymbolicDim) and size.value:
                bindings[size.value] = number

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
    known: Mapping[str, npt.NDArray[Any] | None] = MappingProxyType({}),
    defaults: bool = False,
) -> BoundShapes:
    """The shape of every value of the main graph, with the inputs' shapes bound to `inputs`.

    `known` are values of inputs that are lists of sizes. With `defaults`, the values of optional inputs are used too:
    good enough for costs, but a request may override them.
    """
    with _scratch(model) as bound:
        return _bind(bound, inputs, known, defaults)


@contextmanager
def _scratch(model: ir.Model) -> Iterator[ir.Model]:
    """The model itself, whose values are afterwards as they were before; or a copy if it has control flow.

    To know sizes is to know which branches are taken, and these replace their If.
    """
    if has_subgraphs(model.graph):
        yield model.clone()
        return
    graph = model.graph
    values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    found = [(value.shape, value.type, value.const_value, dict(value.metadata_props)) for value in values]
    try:
        yield model
    finally:
        for value, (shape, type_, tensor, properties) in zip(values, found, strict=True):
            value.shape, value.type = shape, type_
            if value.const_value is not tensor:  # to set it takes long
                value.const_value = tensor
            if properties or value.metadata_props:
                value.metadata_props.clear()
                value.metadata_props.update(properties)


def _bind(
    bound: ir.Model, inputs: Mapping[str, Shape], known: Mapping[str, npt.NDArray[Any] | None], defaults: bool
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
    observed = infer_shapes(bound).observed
    # Inferred shapes allow more shape arithmetic to be computed, and the other way round.
    while fold_shapes(bound.graph) + take_branches(bound.graph) and not _is_known(bound.graph):
        observed |= infer_shapes(bound).observed
    values = [*bound.graph.inputs, *(value for node in bound.graph for value in node.outputs)]
    named = {value.name: value for value in values if value.name}
    shapes = {name: value.shape for name, value in named.items() if value.shape is not None}
    return BoundShapes(
        {name: tuple(size if isinstance(size, int) else 1 for size in shape) for name, shape in shapes.items()},
        frozenset(name for name in named if name not in shapes or not shapes[name].is_static()),
        {name: value.const_value.numpy() for name, value in named.items() if value.const_value is not None},
        observed,
    )


def _is_known(graph: ir.Graph) -> bool:
    return all(value.shape is not None and value.shape.is_static() for node in graph for value in node.outputs)


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
