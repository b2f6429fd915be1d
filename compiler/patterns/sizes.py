"""Compares sizes of axes. Each is known for two sets of input sizes: in one alone, sizes may be equal by chance."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from splitc.compiler.graphs.matching import is_onnx
from splitc.compiler.graphs.optional import source_of
from splitc.compiler.graphs.reads import given_sizes
from splitc.compiler.inference.shapes import BoundShapes, shape_of
from splitc.compiler.patterns.errors import NotFusedError
from splitc.compiler.request.shapes import Shape

# A size with the planned inputs, and with probe sizes.
Size = tuple[int, int]
ONE = (1, 1)
# Symbols that onnx-shape-inference generates for unnamed sizes, alone or in an expression.
MADE_UP = re.compile(r"\b_d\d+\b")


@dataclass(frozen=True)
class Axis:
    """An axis of a value: its sizes in both sets, its symbol or number in the graph, and its size if that is fixed."""

    size: Size
    symbol: Any = None
    fixed: int | None = None

    @property
    def name(self) -> str | None:
        """The symbol of its size in the graph; None if it has none."""
        name = self.symbol.value if isinstance(self.symbol, ir.SymbolicDim) else self.symbol
        return None if name is None else str(name)

    @property
    def entry(self) -> int | ir.SymbolicDim | None:
        """Its size in any request, as a number or a symbol; None if that is not known."""
        if self.fixed is not None:
            return self.fixed
        return None if isinstance(self.symbol, ir.SymbolicDim) and self.symbol.value is None else self.symbol

    def is_same(self, other: Axis) -> bool:
        """Whether both axes have the same size in all requests, by their symbol or number in the graph."""
        is_named = self.fixed == other.fixed if self.fixed is not None else self.name == other.name is not None
        return self.size == other.size and is_named

    def is_apart(self, other: Axis) -> bool:
        """Whether the sizes or the symbols differ, not counting generated symbols."""
        names = {axis.name for axis in (self, other)}
        return self.size != other.size or (len(names) > 1 and not any(n is None or MADE_UP.search(n) for n in names))


def fixed_axis(number: int) -> Axis:
    """An axis of this size in all requests."""
    return Axis((number, number), number, number)


def joined(axes: Iterable[Axis]) -> Axis:
    """Several axes merged into one. Only axes of a fixed size 1 drop out: a batch may be 1 just where it is planned."""
    kept = [axis for axis in axes if axis.fixed != 1]
    if len(kept) == 1:
        return kept[0]
    fixed = [axis.fixed for axis in kept]
    if None not in fixed:
        return fixed_axis(math.prod(number for number in fixed if number is not None))
    entries = [axis.entry for axis in kept]
    symbol = None if None in entries else functools.reduce(operator.mul, entries)
    return Axis(product_of(axis.size for axis in kept), symbol)


def product_of(sizes: Iterable[Size]) -> Size:
    """The size of the axis that several are merged into."""
    planned = probe = 1
    for one, other in sizes:
        planned, probe = planned * one, probe * other
    return planned, probe


def is_one(axes: Iterable[Axis]) -> bool:
    """Whether all axes have one element in all requests."""
    return all(axis.fixed == 1 for axis in axes)


@dataclass(frozen=True)
class Sizes:
    """The shapes of all values for the planned input sizes (`shapes`), and for probe sizes (`probes`).

    Probe sizes differ from the planned ones wherever a size is dynamic. Values that fusion adds are added to both.
    """

    shapes: dict[str, Shape]
    probes: dict[str, Shape]
    # Whether there are probe sizes. If not, only sizes that are numbers in the model's own shapes count as fixed.
    differ: bool

    def of(self, value: ir.Value) -> tuple[Size, ...] | None:
        """The sizes of a value's axes; None if they are not known."""
        if value.const_value is not None:
            return tuple((size, size) for size in shape_of(value))
        shape, probe = self.shapes.get(value.name or ""), self.probes.get(value.name or "")
        if shape is None or probe is None or len(shape) != len(probe) or min((*shape, *probe), default=0) < 0:
            return None
        return tuple(zip(shape, probe, strict=True))

    def axes(self, value: ir.Value) -> tuple[Axis, ...] | None:
        """A value's axes; None if their sizes are not known."""
        sizes = self.of(value)
        if sizes is None:
            return None
        shape = value.shape if value.shape is not None and len(value.shape) == len(sizes) else [None] * len(sizes)
        axes, source = [], source_of(value)
        for number, (size, symbol) in enumerate(zip(sizes, shape, strict=True)):
            known = self.differ or isinstance(symbol, int) or value.const_value is not None
            if source is not None and not source.is_fixed(number):
                known, symbol = False, None
            axes.append(Axis(size, symbol, size[0] if known and size[0] == size[1] else None))
        return tuple(axes)

    def known(self, value: ir.Value, what: str) -> tuple[Axis, ...]:
        """A value's axes. Raises NotFusedError, which says `what` the value is, if their sizes are not known."""
        if (axes := self.axes(value)) is None:
            raise NotFusedError(f"the shape of {what} is not known")
        return axes

    def fixed_parts(self, parts: Sequence[ir.Value], axis: int) -> list[int]:
        """The sizes of a Split's parts along an axis. Raises NotFusedError if they are not fixed."""
        sizes = [fixed for part in parts if (fixed := self.known(part, "its parts")[axis].fixed) is not None]
        if len(sizes) < len(parts):
            raise NotFusedError("the sizes of its parts are dynamic")
        return sizes

    def read_by(self, node: ir.Node) -> list[Axis] | None:
        """The axes whose sizes a Shape returns; None if they are not known."""
        axes = None if node.inputs[0] is None else self.axes(node.inputs[0])
        return None if axes is None else given_sizes(node, axes)

    def put(self, value: ir.Value, axes: Iterable[Axis]) -> None:
        """Set the axes of a new value."""
        axes = tuple(axes)
        value.shape = ir.Shape([axis.symbol for axis in axes])
        self.shapes[value.name or ""] = tuple(axis.size[0] for axis in axes)
        self.probes[value.name or ""] = tuple(axis.size[1] for axis in axes)


def known_shapes(bound: BoundShapes) -> dict[str, Shape]:
    """The shapes of a graph's values, without those that depend on the contents of inputs."""
    return {name: shape for name, shape in bound.shapes.items() if name not in bound.unknown}


def size_readers(*values: ir.Value) -> list[ir.Node]:
    """The nodes that read sizes of these values."""
    return [node for value in values for node, _ in value.uses() if is_onnx(node, "Shape")]
