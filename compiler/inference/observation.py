"""Observes the shapes of operators without a shape function, by running them in ONNX Runtime on generated inputs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir
import sympy
from onnxruntime.capi import onnxruntime_pybind11_state as onnxruntime_build

from splitc.compiler.graphs.alone import node_alone, open_alone
from splitc.compiler.graphs.node_key import node_key, tensor_key
from splitc.compiler.nodes import inputs_of
from splitc.compiler.operators.axes import new_axis
from splitc.compiler.operators.operation import Operation
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.request.shapes import Shape
from splitc.runtime.arrays.ort_values import run_on_arrays
from splitc.runtime.engines.onnxruntime_cpu import ERRORS

# The most elements of a constant that is a list of sizes, scales or axes: no tensor has as many axes. Longer ones are
# data. With 16 the plans of 43 models are the same, and without a limit all but one.
MOST_SIZES = 64
# The most elements of a node's generated inputs: 256 MiB of float32, as an image of 1,024 pixels a side in 64 channels
# has. A choice: a result may be some times as large, and a container small.
MOST_ELEMENTS = 1 << 26
Size = int | ir.SymbolicDim
# The origin of an output's size: a fixed number, or (input, axis); None if neither.
Origin = None | int | tuple[int, int]
# The shape and data type of each output: those of one run, and those that follow from several runs.
Made = list[tuple[Shape, ir.DataType]]
Observed = list[tuple[tuple[Size | None, ...], ir.DataType]]
# The errors that running a node raises. numpy raises the last ones for types that it lacks.
FAILURES: tuple[type[Exception], ...] = (*ERRORS, TypeError, ValueError, AttributeError)


@dataclass(frozen=True)
class Origins:
    """Where the sizes of a node's outputs come from, for inputs of these `sizes` (None stands for any size)."""

    sizes: tuple[tuple[int | None, ...], ...]
    outputs: tuple[tuple[Origin, ...], ...]
    dtypes: tuple[ir.DataType, ...]

    def hold(self, shapes: Sequence[Sequence[Size]]) -> bool:
        """Whether inputs of these shapes have the `sizes`."""
        pairs = zip(self.sizes, shapes, strict=True)
        return all(known in (None, size) for sizes, shape in pairs for known, size in zip(sizes, shape, strict=True))

    def resolve(self, shapes: Sequence[Sequence[Size]]) -> Observed:
        """The outputs' shapes and types for inputs of these shapes."""
        outputs = (
            tuple(shapes[origin[0]][origin[1]] if isinstance(origin, tuple) else origin for origin in origins)
            for origins in self.outputs
        )
        return list(zip(outputs, self.dtypes, strict=True))


# The most signatures. A choice: an observation is a few numbers, and dropped ones are observed again.
@lru_cache(maxsize=1024)
def _observed(signature: Hashable) -> list[Origins]:
    """A list of the observations of nodes with this `signature`, to be appended to."""
    return []


def observe(node: ir.Node) -> Observed | None:
    """The shapes and types of a node's outputs; None if they depend on the contents of inputs, or the node fails.

    The node runs twice, with different primes for its symbols: an output's size that equals the same input's size in
    both runs comes from there. The result is reused for nodes that differ in these sizes alone.
    """
    inputs = [value for value in inputs_of(node) if not _is_kept(value)]
    if any(value.shape is None or value.dtype is None for value in inputs) or (key := signature(node)) is None:
        return None
    shapes = [tuple(value.shape or ()) for value in inputs]
    observed = _observed(key)
    origins = next((origins for origins in observed if origins.hold(shapes)), None) or _find_origins(node, shapes)
    if origins is None:
        return None
    if origins not in observed and not any(None in output for output in origins.outputs):
        observed.append(origins)
    return origins.resolve(shapes)


def _find_origins(node: ir.Node, shapes: Sequence[Sequence[Size]]) -> Origins | None:
    tries = list(_tries(shapes))
    if tries[0] == tries[1]:  # no size is a symbol
        del tries[1]
    results = [made for shapes_tried in tries if (made := _run(node, shapes_tried)) is not None]
    if len(results) < len(tries):
        return None
    outputs = tuple(_explain([shape for shape, _ in made], tries) for made in zip(*results, strict=True))
    sizes = tuple(tuple(size if isinstance(size, int) else None for size in shape) for shape in shapes)
    return Origins(sizes, outputs, tuple(dtype for _, dtype in results[0]))


def _is_kept(value: ir.Value) -> bool:
    """Whether the value is constant and short, so that sizes may depend on its elements."""
    return value.const_value is not None and value.const_value.size <= MOST_SIZES


def signature(node: ir.Node) -> Hashable:
    """A key that is equal for nodes that differ only in the sizes of their inputs; None if they can't be compared."""
    key = node_key(node)
    return None if key is None else (key, tuple([None if value is None else _known(value) for value in node.inputs]))


def _known(value: ir.Value) -> Hashable:
    """What identifies an input in a signature: its elements if it is a short constant, else its type and rank."""
    if value.const_value is None:
        return value.dtype, len(value.shape or ())
    return tensor_key(value.const_value) if _is_kept(value) else (value.dtype, tuple(value.const_value.shape.numpy()))


def _tries(shapes: Sequence[Sequence[Size]]) -> Iterator[list[Shape]]:
    """The shapes with distinct primes for their symbols, twice. The primes differ from all fixed sizes."""
    named = [
        [size if isinstance(size, int) else size.value or f"{place}.{axis}" for axis, size in enumerate(shape)]
        for place, shape in enumerate(shapes)
    ]
    fixed = {size for shape in named for size in shape if isinstance(size, int)}
    unused = (prime for prime in primes(3) if prime not in fixed)
    for _ in range(2):
        numbers: dict[str, int] = defaultdict(lambda: next(unused))
        yield [tuple(size if isinstance(size, int) else numbers[size] for size in shape) for shape in named]


def primes(smallest: int) -> Iterator[int]:
    """The primes from `smallest` on."""
    prime = smallest - 1
    while True:
        prime = int(sympy.nextprime(prime))
        yield prime


def primes_of(graph: ir.Graph, smallest: int = 3) -> Iterator[int]:
    """The primes from `smallest` on that divide no size of a weight."""
    tensors = (weight.const_value for weight in graph.initializers.values())
    avoid = {size for tensor in tensors if tensor is not None for size in tensor.shape.numpy()}
    yield from (number for number in primes(smallest) if not any(size % number == 0 for size in avoid if size))


def _explain(made: Sequence[Shape], tries: Sequence[Sequence[Shape]]) -> tuple[Origin, ...]:
    """The origins of one output's sizes. `made` are its shapes in the tries."""
    if len({len(shape) for shape in made}) > 1:
        return (None,)
    places = [(place, axis) for place, shape in enumerate(tries[0]) for axis in range(len(shape))]
    origins: list[Origin] = []
    for sizes in zip(*made, strict=True):
        same = (place for place in places if tuple(shapes[place[0]][place[1]] for shapes in tries) == sizes)
        origins.append(sizes[0] if len(set(sizes)) == 1 else next(same, None))
    return tuple(origins)


def refusal(
    node: ir.Node, shapes: Sequence[Shape | None], fills: Sequence[Any] = (np.zeros,), made: Sequence[Shape | None] = ()
) -> str | None:
    """Why ONNX Runtime does not run the node on inputs of these shapes (None: a missing input); None if it does.

    It is enough that the node runs with one of the `fills`. None also if the CPU provider has no kernel for the node's
    types. `made` are the outputs' shapes, if known.
    """
    pairs = zip(node.inputs, shapes, strict=True)
    made_up = [shape or () for value, shape in pairs if value is not None and not _is_kept(value)]
    reason = ""
    try:
        graph, examples = node_alone(node, _is_kept, made_up), _examples(node, shapes, made)
        session = open_alone(graph)
    except onnxruntime_build.NotImplemented:
        return None
    except FAILURES as error:
        return str(error)
    for fill in fills:
        try:
            run_on_arrays(session, None, _filled(graph, fill, examples))
            return None
        except onnxruntime_build.NotImplemented:
            return None
        except FAILURES as error:
            reason = str(error)
    return reason


def _examples(node: ir.Node, shapes: Sequence[Shape | None], made: Sequence[Shape | None]) -> dict[str | None, Any]:
    """Example values of inputs that need special ones, by their names in the graph of `node_alone`."""
    if (example := operator_of(node).example_input) is None:
        return {}
    inputs, outputs = (
        [None if shape is None else tuple(map(new_axis, shape)) for shape in of] for of in (shapes, made)
    )
    operation = Operation(node, inputs, outputs, [])
    given = (number for number, shape in enumerate(shapes) if shape is not None)
    examples = {f"input{number}": example(operation, number) for number in given}
    return {name: value for name, value in examples.items() if value is not None}


def _run(node: ir.Node, shapes: Sequence[Shape]) -> Made | None:
    """The outputs' shapes and types for inputs of these shapes.

    None if they differ for zeros and ones, or if the node fails or has larger inputs than MOST_ELEMENTS.
    """
    if sum(map(math.prod, shapes)) > MOST_ELEMENTS:
        return None
    graph = node_alone(node, _is_kept, shapes)
    try:
        session = open_alone(graph)
        made = [
            [(tuple(array.shape), ir.DataType.from_numpy(array.dtype)) for array in arrays]
            for arrays in (run_on_arrays(session, None, _filled(graph, fill)) for fill in (np.zeros, np.ones))
        ]
    except FAILURES:
        return None
    return made[0] if made[0] == made[1] else None


def _filled(graph: ir.Graph, fill: Any, examples: Mapping[str | None, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Inputs for the graph of one node: from `examples`, else zeros or ones."""
    return {
        v.name or "": fill(v.shape.numpy(), v.dtype.numpy())
        if v.name not in examples
        else np.full(v.shape.numpy(), examples[v.name], v.dtype.numpy())
        for v in graph.inputs
        if v.shape is not None and v.dtype
    }
