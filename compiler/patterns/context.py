"""What all patterns share: the graph that is fused, what is known of its values, and where fusion gains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from splitc.compiler.graphs.editor import Editor
from splitc.compiler.inference.shapes import BoundShapes
from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.patterns.kernels import Gains
from splitc.compiler.patterns.sizes import Sizes, known_shapes
from splitc.compiler.patterns.tables import Tables
from splitc.compiler.request.shapes import Shape
from splitc.compiler.sizes.probes import Probes
from splitc.runtime.package.states import State


@dataclass(frozen=True)
class Context:
    """A graph that is fused in place.

    `shapes` are those of its inputs, and `bound` those of its values for them. `planned` has also the shapes of values
    that fusion adds.
    """

    graph: Graph
    shapes: Mapping[str, Shape]
    bound: BoundShapes
    gains: Gains
    states: Sequence[State]
    planned: dict[str, Shape]
    editor: Editor

    @cached_property
    def other_sizes(self) -> BoundShapes:
        """The shapes for probe sizes. Their inference takes long, so it waits until a pattern may be fused."""
        return Probes(self.graph, self.shapes, self.bound).different()

    @cached_property
    def sizes(self) -> Sizes:
        """The sizes of all values."""
        return Sizes(self.planned, known_shapes(self.other_sizes), self.other_sizes is not self.bound)

    @cached_property
    def tables(self) -> Tables:
        """The tables of cosines and sines that the model computes from positions."""
        other = self.other_sizes
        return Tables(self.graph, known_shapes(other), {} if other is self.bound else other.constants)

    @cached_property
    def pasts(self) -> frozenset[str]:
        """The names of the states' inputs."""
        return frozenset(state.input for state in self.states)

    def shape_of(self, value: ir.Value) -> Shape | None:
        """The planned shape of a value; None if it is not known."""
        if value.const_value is not None:
            return tuple(value.const_value.shape.numpy())
        return None if (value.name or "") in self.bound.uncertain else self.planned.get(value.name or "")

    def rank_of(self, value: ir.Value) -> int | None:
        """The number of a value's axes; None if it is not known."""
        shape = self.shape_of(value)
        return None if shape is None else len(shape)
