"""Traces elements of a value through slices, concatenations and negations along its last axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from splitc.compiler.graphs.matching import VIEWS, constant, constant_numbers
from splitc.compiler.nodes import input_at
from splitc.compiler.patterns.context import Context
from splitc.compiler.patterns.operand import PASSED

Places = npt.NDArray[np.int64]
# The most nodes that are traced back. A choice: exporters write a rotation with up to a dozen.
FARTHEST = 32


@dataclass(frozen=True)
class Rotation:
    """Says where the elements along the last axis of `data` are in values computed from it. Other axes have to stay.

    Elements are numbered from 1: -n is the negated nth one.
    """

    data: ir.Value
    context: Context

    def of(self, value: ir.Value) -> Places | None:
        """The elements along a value's last axis, as numbers of the data's; None if it holds anything else."""
        places = self._of(value, FARTHEST)
        return None if places is None or places.ndim != 1 else places

    def along_pairs(self, value: ir.Value) -> Places | None:
        """As `of`, for a value that may have an added last axis of one element, as parts of complex numbers do."""
        places = self._of(value, FARTHEST)
        is_thin = places is not None and places.ndim == 2 and places.shape[1] == 1 < places.shape[0]
        return None if places is None or (places.ndim != 1 and not is_thin) else places.reshape(-1)

    def _of(self, value: ir.Value, left: int) -> Places | None:
        sizes, own = self.context.sizes.of(self.data), self.context.sizes.of(value)
        if sizes is None or own is None or own[: len(sizes) - 1] != sizes[:-1] or sizes[-1][0] != sizes[-1][1]:
            return None
        inner = tuple(size for size, _ in own[len(sizes) - 1 :])
        if value is self.data:
            return np.arange(1, inner[0] + 1)
        node = value.producer()
        rule = None if node is None or node.domain or not left else RULES.get(node.op_type)
        if node is None or rule is None:
            return None
        read = [self._of(source, left - 1) for source in self._sources(node)]
        if any(places is None for places in read):
            return None
        step = _Step(self.context, node, value, len(sizes) - 1, inner)
        made = rule(step, [places for places in read if places is not None])
        return made if made is not None and made.shape == inner else None

    @staticmethod
    def _sources(node: ir.Node) -> list[ir.Value]:
        """The inputs that are data, rather than indices or sizes."""
        count = len(node.inputs) if node.op_type == "Concat" else 1
        return [value for value in node.inputs[:count] if value is not None]


@dataclass(frozen=True)
class _Step:
    """A node that makes `value`, whose axes from number `outer` on have the sizes `inner`."""

    context: Context
    node: ir.Node
    value: ir.Value
    outer: int
    inner: tuple[int, ...]

    def integers(self, number: int) -> list[int] | None:
        """An input that is a list of integers, or one integer; None if it is not known."""
        value = input_at(self.node, number)
        if value is None or value.const_value is not None:
            return constant_numbers(value)
        array = self.context.tables.known.get(value.name or "")
        return None if array is None else [int(one) for one in array.reshape(-1)]

    def axis(self, number: int, ndim: int) -> int | None:
        """The number of an axis among the `ndim` inner ones; None for an outer one."""
        axis = number - self.outer if number >= 0 else number + ndim
        return axis if 0 <= axis < ndim else None


def _scaled(step: _Step, read: list[Places]) -> Places | None:
    number = constant(step.node.inputs[1])
    return read[0] * int(number) if number in (1, -1) else None


def _viewed(step: _Step, read: list[Places]) -> Places | None:
    return read[0].reshape(step.inner) if read[0].size == np.prod(step.inner) else None


def _joined(step: _Step, read: list[Places]) -> Places | None:
    axis = step.axis(step.node.attributes.get_int("axis", -1), read[0].ndim)
    return None if axis is None else np.concatenate(read, axis)


def _divided(step: _Step, read: list[Places]) -> Places | None:
    """One output of a Split."""
    axis = step.axis(step.node.attributes.get_int("axis", 0), read[0].ndim)
    number = step.node.outputs.index(step.value)
    before = [step.context.sizes.of(value) for value in step.node.outputs[:number]]
    if axis is None or any(sizes is None for sizes in before):
        return None
    start = sum(sizes[step.outer + axis][0] for sizes in before if sizes is not None)
    return read[0].take(range(start, start + step.inner[axis]), axis)


def _sliced(step: _Step, read: list[Places]) -> Places | None:
    starts, ends = step.integers(1), step.integers(2)
    if starts is None or ends is None:
        return None
    axes, steps = step.integers(3), step.integers(4)
    made = read[0]
    for place, (start, end) in enumerate(zip(starts, ends, strict=True)):
        axis = step.axis(axes[place] if axes is not None else place, made.ndim)
        if axis is None:
            return None
        by = steps[place] if steps is not None else 1
        made = made[(slice(None),) * axis + (slice(start, end if end >= 0 or by > 0 else None, by),)]
    return made


def _gathered(step: _Step, read: list[Places]) -> Places | None:
    axis, indices = step.axis(step.node.attributes.get_int("axis", 0), read[0].ndim), step.integers(1)
    shape = None if step.node.inputs[1] is None else step.context.sizes.of(step.node.inputs[1])
    if axis is None or indices is None or shape is None or not all(i < read[0].shape[axis] for i in indices):
        return None
    return read[0].take(indices if shape else indices[0], axis)


RULES: Mapping[str, Callable[[_Step, list[Places]], Places | None]] = {
    **dict.fromkeys(PASSED, lambda step, read: read[0]),
    **dict.fromkeys(VIEWS, _viewed),
    "Neg": lambda step, read: -read[0],
    "Mul": _scaled,
    "Concat": _joined,
    "Split": _divided,
    "Slice": _sliced,
    "Gather": _gathered,
}
