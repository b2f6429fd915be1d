"""Optional inputs: initializers that are also inputs, so that a request may override the model's default.

In splitc's graph they are initializers with a mark: they may be sharded, but not folded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnx_ir.passes.common as passes

from splitc.compiler.graphs.editor import add_initializer
from splitc.compiler.graphs.lazy_tensors import runs_of
from splitc.compiler.graphs.reads import has_subgraphs
from splitc.compiler.nodes import OPTIONAL
from splitc.runtime.package.manifest import Override

# From this version on, an initializer that is an input may be overridden. Before, every initializer had to be an input.
FIRST_IR_VERSION = 4


@dataclass(frozen=True)
class OptionalOrigin:
    """The optional input that an initializer is, or is a shard of. `places` are a shard's indices by sharded axis.

    `declared` is the input's shape in the model, which may be dynamic.
    """

    input: str
    declared: ir.Shape | None
    places: Mapping[int, npt.NDArray[np.int64]] = field(default_factory=dict)

    @property
    def has_fixed_shape(self) -> bool:
        """Whether its shape is the same in all requests."""
        return self.declared is not None and self.declared.is_static()

    def is_fixed(self, axis: int) -> bool:
        """Whether its size along an axis is the same in all requests."""
        return self.declared is not None and isinstance(self.declared[axis], int)


def mark_optional(model: ir.Model) -> tuple[ir.Value, ...]:
    """Remove initializers from the graph's inputs, in place, and mark and return those that are optional.

    Before FIRST_IR_VERSION none is optional. The model gets that version, since ONNX Runtime lets branches read no
    other initializers than inputs before it.
    """
    given = [value for value in model.graph.inputs if value.is_initializer()]
    optional = given if model.ir_version >= FIRST_IR_VERSION else []
    for value in optional:
        value.meta[OPTIONAL] = OptionalOrigin(value.name or "", value.shape)
    if given or has_subgraphs(model.graph):  # the pass walks the whole model
        passes.RemoveInitializersFromInputsPass()(model)
    model.ir_version = max(model.ir_version, FIRST_IR_VERSION)
    return tuple(optional)


def unmark(value: ir.Value) -> None:
    """Make an optional input an ordinary weight."""
    value.meta.pop(OPTIONAL, None)


def source_of(value: ir.Value | None) -> OptionalOrigin | None:
    """The optional input that an initializer comes from; None for other initializers."""
    if value is None or OPTIONAL not in value.meta:  # a get of a missing key is slow: it raises an error inside
        return None
    source: OptionalOrigin = value.meta[OPTIONAL]
    return source


def optional_inputs(graph: ir.Graph) -> list[ir.Value]:
    """The initializers of a graph that come from optional inputs."""
    return [value for value in graph.initializers.values() if source_of(value) is not None]


def add_optional(graph: ir.Graph, tensor: ir.TensorProtocol, sizes: ir.Shape | Sequence[int | str]) -> ir.Value:
    """A new optional input of a graph, with this default, and these sizes, some of them symbols."""
    value = add_initializer(graph, tensor)
    value.meta[OPTIONAL] = OptionalOrigin(value.name or "", ir.Shape(sizes))
    return value


def mark_part(part: ir.Value, whole: ir.Value, places: Mapping[int, npt.NDArray[np.int64]]) -> None:
    """Mark a new initializer as a shard of another one, if that is optional. `places` are its indices by axis."""
    if (source := source_of(whole)) is not None:
        part.meta[OPTIONAL] = OptionalOrigin(source.input, source.declared, places)


@contextmanager
def defaults_hidden(graph: ir.Graph) -> Iterator[None]:
    """Hide the default values of optional inputs inside the context, so that nothing is folded from them."""
    hidden = [(value, value.const_value, value.shape) for value in optional_inputs(graph)]
    for value, _, _ in hidden:
        value.const_value = None
    try:
        yield
    finally:
        for value, tensor, shape in hidden:
            value.const_value, value.shape = tensor, shape


def make_overridable(graph: ir.Graph) -> list[Override]:
    """Make initializers that come from optional inputs inputs again, in place. Returns the manifest's entries."""
    overrides = []
    for value in optional_inputs(graph):
        source = source_of(value)
        assert source is not None
        if source.declared is not None:  # a shard has its own size along sharded axes
            own = value.shape or source.declared
            sizes = zip(own, source.declared, strict=True)
            value.shape = ir.Shape(
                [size if axis in source.places else whole for axis, (size, whole) in enumerate(sizes)]
            )
        elif not source.places:
            value.shape = None
        graph.inputs.append(value)
        places = {axis: runs_of(indices) for axis, indices in source.places.items()}
        overrides.append(Override(source.input, value.name or "", places))
    return overrides
