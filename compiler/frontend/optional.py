"""Optional inputs: initializers that are inputs too. A run may give another value in the place of the model's own.

In the graph they are weights, and marked: what they hold may be cut, but nothing may follow from their values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnx_ir.passes.common as passes

from splitc.runtime.manifest import Override

# Where ONNX lets a run override an initializer: before, each of them had to be an input.
FIRST_IR_VERSION = 4
_MARK = "splitc.optional"


@dataclass(frozen=True)
class OptionalOrigin:
    """What an initializer is of an optional input: along each axis in `places` these elements, else all of it.

    `declared` is the shape that the model gives the input, which may be less fixed than that of its default.
    """

    input: str
    declared: ir.Shape | None
    places: Mapping[int, npt.NDArray[np.int64]] = field(default_factory=dict)

    @property
    def is_fixed(self) -> bool:
        """Whether a run can't give it another shape."""
        return self.declared is not None and self.declared.is_static()


def mark_optional(model: ir.Model) -> tuple[ir.Value, ...]:
    """Take the inputs that are initializers off the inputs, in place, and mark them. Returns those that are optional.

    Of versions of ONNX in which each initializer is an input none is.
    """
    given = [value for value in model.graph.inputs if value.is_initializer()]
    optional = given if model.ir_version >= FIRST_IR_VERSION else []
    for value in optional:
        value.meta[_MARK] = OptionalOrigin(value.name or "", value.shape)
    passes.RemoveInitializersFromInputsPass()(model)
    return tuple(optional)


def unmark(value: ir.Value) -> None:
    """Make a weight like any other of an optional input."""
    value.meta.pop(_MARK, None)


def source_of(value: ir.Value | None) -> OptionalOrigin | None:
    """What an initializer is of an optional input, or None."""
    source: OptionalOrigin | None = value.meta.get(_MARK) if value is not None else None
    return source


def optional_inputs(graph: ir.Graph) -> list[ir.Value]:
    """The initializers of a graph that come from optional inputs."""
    return [value for value in graph.initializers.values() if source_of(value) is not None]


def mark_part(part: ir.Value, whole: ir.Value, places: Mapping[int, npt.NDArray[np.int64]]) -> None:
    """Say that a new initializer has of another one these elements along these axes."""
    if (source := source_of(whole)) is not None:
        part.meta[_MARK] = OptionalOrigin(source.input, source.declared, places)


@contextmanager
def defaults_hidden(graph: ir.Graph) -> Iterator[None]:
    """Meanwhile nothing can be concluded from the values that optional inputs have by default."""
    found = [(value, value.const_value, value.shape) for value in optional_inputs(graph)]
    for value, _, _ in found:
        value.const_value = None
    try:
        yield
    finally:
        for value, tensor, shape in found:
            value.const_value, value.shape = tensor, shape


def make_overridable(graph: ir.Graph) -> list[Override]:
    """Make inputs, in place, of the initializers that come from optional inputs. Returns what they are of these."""
    found = []
    for value in optional_inputs(graph):
        source = source_of(value)
        assert source is not None
        if not source.places:
            value.shape = source.declared
        graph.inputs.append(value)
        places = {axis: _runs(indices) for axis, indices in source.places.items()}
        found.append(Override(source.input, value.name or "", places))
    return found


def _runs(indices: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """Growing indices as stretches from the first to before the last."""
    pieces = np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1)
    return [(int(piece[0]), int(piece[-1]) + 1) for piece in pieces if len(piece)]
