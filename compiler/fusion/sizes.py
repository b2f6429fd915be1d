"""Sizes of axes that are compared: with two sets of input sizes, since in one of them some may be equal by chance."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.frontend.shapes import BoundShapes, shape_of
from splitc.compiler.request.shapes import Shape

# A size with the planned inputs, and with probe sizes.
Size = tuple[int, int]


@dataclass(frozen=True)
class Sizes:
    """The shapes of all values with the planned inputs, and with others that differ in each size that may.

    `shapes` grows with the values that are added.
    """

    shapes: dict[str, Shape]
    probes: dict[str, Shape]
    # Whether the probes differ: if they can't, only sizes that the model's own shapes have as numbers are fixed.
    differ: bool

    def of(self, value: ir.Value) -> tuple[Size, ...] | None:
        """The sizes of a value's axes; None if they are not known."""
        if value.const_value is not None:
            return tuple((size, size) for size in shape_of(value))
        shape, probe = self.shapes.get(value.name or ""), self.probes.get(value.name or "")
        if shape is None or probe is None or len(shape) != len(probe) or min((*shape, *probe), default=0) < 0:
            return None
        return tuple(zip(shape, probe, strict=True))

    def fixed(self, value: ir.Value, axis: int) -> int | None:
        """The size of an axis if no request changes it."""
        sizes = self.of(value)
        if sizes is None or sizes[axis][0] != sizes[axis][1]:
            return None
        known = value.const_value is not None or (value.shape is not None and isinstance(value.shape[axis], int))
        return sizes[axis][0] if self.differ or known else None

    def put(self, value: ir.Value, sizes: tuple[Size, ...]) -> None:
        """Say the sizes of a value that is new."""
        self.shapes[value.name or ""] = tuple(planned for planned, _ in sizes)
        self.probes[value.name or ""] = tuple(probe for _, probe in sizes)


def read_sizes(bound: BoundShapes, probed: BoundShapes) -> Sizes:
    """The sizes of a graph's values. `probed` is `bound` itself where nothing else could be bound."""
    return Sizes(_known(bound), _known(probed), probed is not bound)


def _known(bound: BoundShapes) -> dict[str, Shape]:
    """The shapes without those that depend on data."""
    return {name: shape for name, shape in bound.shapes.items() if name not in bound.unknown}
