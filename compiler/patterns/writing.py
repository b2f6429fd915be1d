"""Adds the nodes that replace decomposed ones, and records the sizes of their results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.origins import take_place
from splitc.compiler.graphs.walks import producer_of
from splitc.compiler.nodes import unused_name
from splitc.compiler.patterns.context import Context
from splitc.compiler.patterns.errors import NotFusedError
from splitc.compiler.patterns.operand import ADDED, Operand
from splitc.compiler.patterns.sizes import Axis, Size, Sizes, fixed_axis


@dataclass(frozen=True)
class _Source:
    """Where a size can be read: axis `place` of a value, times `times`, divided by `over`."""

    value: ir.Value
    place: int
    times: int = 1
    over: int = 1


@dataclass(frozen=True)
class Writer:
    """Adds nodes before the node `at`, and names their results `name`/role. Dynamic sizes are read off the `sources`.

    `known` are values that hold one size each, by that size; they are preferred to sources.
    """

    at: ir.Node
    name: str
    sources: tuple[ir.Value, ...]
    editor: Editor
    sizes: Sizes
    added: list[ir.Node] = field(default_factory=list)
    known: Mapping[Size, ir.Value] = field(default_factory=dict)

    @staticmethod
    def of(value: ir.Value, context: Context, *sources: ir.Value, name: str | None = None) -> Writer:
        """A writer of nodes before the one that makes a value, named after it. Sources of unknown sizes are ignored."""
        known = tuple(source for source in sources if context.sizes.of(source) is not None)
        return Writer(producer_of(value), name or value.name or "", known, context.editor, context.sizes)

    @contextmanager
    def undone_if_refused(self) -> Iterator[None]:
        """Remove all added nodes if NotFusedError is raised. Nothing else may read their results."""
        try:
            yield
        except NotFusedError:
            self.undo()
            raise

    def add(
        self,
        role: str,
        operator: str,
        inputs: Sequence[ir.Value | None],
        like: ir.Value,
        axes: Iterable[Axis],
        domain: str = "",
        **attributes: Any,
    ) -> ir.Value:
        """Add a node of one output. Returns its result, which has these axes and the type of `like`."""
        value = self.editor.before(self.at, operator, *inputs, domain=domain, **attributes)
        self.added.append(producer_of(value))
        self.name_value(value, role, like, axes)
        return value

    def insert(self, node: ir.Node) -> None:
        """Add a node that was made elsewhere. Its results still need names."""
        self.editor.graph.insert_before(self.at, node)
        self.added.append(node)

    def name_value(self, value: ir.Value, role: str, like: ir.Value, axes: Iterable[Axis]) -> None:
        """Name a new node's result, and record its axes, and its type as that of `like`."""
        value.name, value.type = unused_name(f"{self.name}/{role}", self.sizes.shapes), like.type
        self.sizes.put(value, axes)

    def take_place(self, new: ir.Value, old: ir.Value) -> None:
        """Make all readers of an old value read a new one, which takes its name and keeps its own axes."""
        axes = self.axes(new)
        take_place(new, old)
        self.sizes.put(new, axes)

    def undo(self) -> None:
        """Remove all added nodes. Nothing else may read their results."""
        for node in reversed(self.added):
            self.editor.graph.remove(node, safe=True)
        self.added.clear()

    def axes(self, value: ir.Value) -> tuple[Axis, ...]:
        """The axes of a value whose sizes are known."""
        axes = self.sizes.axes(value)
        assert axes is not None
        return axes

    def cast(self, value: ir.Value, like: ir.Value, role: str) -> ir.Value:
        """A value cast to the type of another one; the value itself if it has that type already."""
        if value.dtype == like.dtype:
            return value
        assert like.dtype is not None
        made = self.add(role, "Cast", [value], value, self.axes(value), to=like.dtype)
        made.type = ir.TensorType(like.dtype)
        return made

    def transpose(self, operand: Operand, role: str) -> ir.Value:
        """An operand's value, transposed by its axes. Its factor is not applied."""
        if operand.is_value:
            return operand.value
        value, own = operand.value, self.axes(operand.value)
        order = [n for n in operand.axes if n != ADDED]
        if order != sorted(order):
            value = self.add(role, "Transpose", [value], value, [own[n] for n in order], perm=order)
        axes = [fixed_axis(1) if n == ADDED else own[n] for n in operand.axes]
        return self.reshape(value, axes, f"{role}_axes") if ADDED in operand.axes else value

    def reshape(self, value: ir.Value, axes: Sequence[Axis], role: str) -> ir.Value:
        """A value, reshaped to other axes; the value itself if it has them already."""
        own = self.axes(value)
        kept = [self._is_same(*pair) for pair in zip(own, axes, strict=False)]
        if len(own) == len(axes) and all(kept):
            return value
        numbers: list[int | Axis] = [
            axis.fixed if axis.fixed is not None else 0 if place < len(kept) and kept[place] else axis
            for place, axis in enumerate(axes)
        ]
        if (free := self._freed(numbers)) is not None:
            numbers[free] = -1
        return self.add(role, "Reshape", [value, self.list_of(numbers, role)], value, axes)

    def _freed(self, numbers: Sequence[int | Axis]) -> int | None:
        """The axis whose size a Reshape infers (-1): one whose size can't be read, else the first dynamic one."""
        open_axes = [place for place, number in enumerate(numbers) if isinstance(number, Axis)]
        unread = [place for place in open_axes if isinstance(axis := numbers[place], Axis) and not self.has(axis)]
        return next(iter((*unread, *open_axes)), None)

    def expand(self, value: ir.Value, axes: Sequence[Axis], role: str) -> ir.Value:
        """A value, expanded along axes of one element. Missing leading axes are added."""
        lacking = len(axes) - len(self.axes(value))
        own = (*[fixed_axis(1)] * lacking, *self.axes(value))
        kept = [self._is_same(*pair) for pair in zip(own, axes, strict=True)]
        if not lacking and all(kept):
            return value
        numbers: list[int | Axis] = [
            1 if is_kept else axis.fixed if axis.fixed is not None else axis
            for axis, is_kept in zip(axes, kept, strict=True)
        ]
        return self.add(role, "Expand", [value, self.list_of(numbers, role)], value, axes)

    def has(self, axis: Axis) -> bool:
        """Whether an axis' size is fixed, known, or can be read from a source."""
        return axis.fixed is not None or axis.size in self.known or self._source(axis) is not None

    def can_read_elsewhere(self, shape: ir.Node) -> bool:
        """Whether the sizes that a Shape returns can be read off the sources, and are no output of the model."""
        axes = self.sizes.read_by(shape)
        return axes is not None and all(map(self.has, axes)) and not shape.outputs[0].is_graph_output()

    def read_elsewhere(self, shape: ir.Node, role: str) -> None:
        """Make readers of a Shape read the same sizes off the sources, where that is possible."""
        if self.can_read_elsewhere(shape):
            made = replace(self, at=shape).list_of(self.sizes.read_by(shape) or (), role)
            shape.outputs[0].replace_all_uses_with(made)

    def list_of(self, numbers: Sequence[int | Axis], role: str) -> ir.Value:
        """A one-dimensional int64 value of sizes; a constant if all are fixed.

        Raises NotFusedError if a dynamic size can't be read off the sources.
        """
        if not any(isinstance(number, Axis) for number in numbers):
            return self.editor.constant(np.array(numbers, np.int64))
        parts = [self._number(number, f"{role}_size{place}") for place, number in enumerate(numbers)]
        return parts[0] if len(parts) == 1 else self.integers(f"{role}_sizes", "Concat", parts, len(numbers), axis=0)

    def _number(self, number: int | Axis, role: str) -> ir.Value:
        """An int64 value that holds one size."""
        fixed = number.fixed if isinstance(number, Axis) else number
        if fixed is not None:
            return self.editor.numbers(fixed)
        assert isinstance(number, Axis)
        if number.size in self.known:
            return self.known[number.size]
        source = self._source(number)
        if source is None:
            raise NotFusedError("no known value has one of its dynamic sizes")
        sizes = self.integers(f"{role}_of", "Shape", [source.value], len(self.axes(source.value)))
        place = self.editor.numbers(source.place)
        size = self.integers(role, "Gather", [sizes, place], 1)
        for operator, factor in (("Mul", source.times), ("Div", source.over)):
            if factor != 1:
                size = self.integers(role, operator, [size, self.editor.numbers(factor)], 1)
        return size

    def integers(self, role: str, operator: str, inputs: Sequence[ir.Value], count: int, **attributes: Any) -> ir.Value:
        """Add a node whose result is int64 [count]."""
        value = self.add(role, operator, inputs, inputs[0], [fixed_axis(count)], **attributes)
        value.type = ir.TensorType(ir.DataType.INT64)
        return value

    def _source(self, axis: Axis) -> _Source | None:
        """Where an axis' size can be read: off an equal axis, else off an axis of a multiple or a fraction of its size.

        An axis with the same symbol is preferred: others may be broadcast, and so have one element in other requests.
        """
        places = [(value, place, own) for value in self.sources for place, own in enumerate(self.axes(value))]
        same = [(value, place, own.is_same(axis)) for value, place, own in places if own.size == axis.size]
        for value, place, is_named in sorted(same, key=lambda one: not one[2]):
            if is_named or self.sizes.differ:
                return _Source(value, place)
        for value, place, own in places if self.sizes.differ else []:
            (one, other), (planned, probe) = axis.size, own.size
            if one * probe == other * planned and 0 not in (one, planned):
                if one % planned == 0:
                    return _Source(value, place, times=one // planned)
                if planned % one == 0 and own.fixed is None:
                    return _Source(value, place, over=planned // one)
        return None

    def _is_same(self, one: Axis, other: Axis) -> bool:
        """Whether two axes have the same size; without probe sizes, also no different symbols."""
        return one.size == other.size and (self.sizes.differ or not one.is_apart(other))

    def has_sizes(self, value: ir.Value, axes: Sequence[Axis]) -> bool:
        """Whether a value has axes of these sizes."""
        own = self.sizes.axes(value)
        return own is not None and [axis.size for axis in own] == [axis.size for axis in axes]
