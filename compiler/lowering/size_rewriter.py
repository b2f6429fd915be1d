"""Corrects shape vectors in a rank's graph, where sizes of shards stand for sizes of whole values, or vice versa.

A Shape returns the sizes of the rank's shard. A node that takes sizes (Reshape, Expand) needs those of the rank's shard
of its result. All other readers need the sizes of whole values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from splitc.compiler.graphs.editor import WHERE
from splitc.compiler.graphs.matching import constant_numbers
from splitc.compiler.graphs.origins import hand_over
from splitc.compiler.graphs.reads import given_sizes
from splitc.compiler.lowering.rank_forms import RankEditor
from splitc.compiler.nodes import inputs_of
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Axis
from splitc.compiler.operators.operation import Axes, Operation, Sizes
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.sharding.shards import Shards
from splitc.runtime.arrays.array import Array


@dataclass(frozen=True)
class _Correction:
    """The correction of one size: x `times` / `over`, or replacement by `size` if that is given."""

    times: int = 1
    over: int = 1
    size: int | None = None


_SAME = _Correction()


@dataclass
class SizeRewriter:
    """Rewrites the nodes of a rank's graph, which must be visited in topological order.

    `read` has each shape vector with sizes of shards, and for each of its entries the axis that it is the size of.
    """

    editor: RankEditor
    axes_of: Callable[[ir.Value], Axes]
    length_of: Callable[[ir.Value], int]
    read: dict[ir.Value, Sizes] = field(default_factory=dict)
    _whole: dict[ir.Value, ir.Value] = field(default_factory=dict)

    def rewrite(self, node: ir.Node, operation: Operation) -> None:
        """Correct the sizes that a node reads, and record a result that holds sizes of shards."""
        if operator_of(node).reads_shape:
            self._note_shape(node, operation.inputs[0])
            return
        dtype = node.outputs[0].dtype
        passing = operator_of(node).passes_sizes and not operation.sizes and (dtype is None or dtype.is_integer())
        passed = self._passed_sizes(node) if passing else None
        if passed is not None:
            self.read[node.outputs[0]] = passed
            return
        for number, value in enumerate(node.inputs):
            if value is None:
                continue
            if number in operation.sizes:
                new = self.localize(node, value, operation.sizes[number])
            else:
                new = self.globalize(node, value)
            if new is not value:
                node.replace_input_with(number, new)
        for name, sizes in operation.attributes.items():
            if name in node.attributes:
                node.attributes[name] = local_attribute(self.editor.shards, node, name, sizes)

    def _note_shape(self, node: ir.Node, axes: Axes) -> None:
        if axes is None or not self.editor.shards.splits(axes):
            return
        if node.op_type == "Size":
            self.read[node.outputs[0]] = [ax.product(axes)]
            return
        sizes = given_sizes(node, axes)
        if any(map(self.editor.shards.is_split, sizes)):
            self.read[node.outputs[0]] = sizes

    def _passed_sizes(self, node: ir.Node) -> Sizes | None:
        """The axes of the sizes in a node's result, if it selects or joins sizes by constant indices; else None."""
        if self.read.keys().isdisjoint(node.inputs):
            return None
        if node.op_type == "Concat":
            return [entry for value in inputs_of(node) for entry in self._entries(value)]
        data = node.inputs[0]
        if data is None or data not in self.read:
            return None
        entries = list(self.read[data])
        if node.op_type == "Gather":
            indices = constant_numbers(node.inputs[1])
            return None if indices is None else [entries[index] for index in indices]
        if node.op_type == "Slice":
            named = [node.attributes.get_ints(name, None) for name in ("starts", "ends")]
            starts, ends = named if all(named) else map(constant_numbers, node.inputs[1:3])
            step = constant_numbers(node.inputs[4]) if len(node.inputs) > 4 else [1]
            return entries[starts[0] : ends[0]] if starts and ends and step == [1] else None
        return entries

    def _entries(self, value: ir.Value) -> Sizes:
        """The axis of each entry of a shape vector; None for entries that are not sizes of shards."""
        return self.read.get(value) or [None] * self.length_of(value)

    def globalize(self, node: ir.Node, value: ir.Value) -> ir.Value:
        """A shape vector, corrected to sizes of whole values; new nodes are inserted before `node`."""
        if value not in self.read:
            return value
        if value not in self._whole:
            corrections = [self._correction(axis, None) for axis in self.read[value]]
            self._whole[value] = self._correct(node, value, corrections)
        return self._whole[value]

    def globalize_output(self, value: ir.Value) -> ir.Value:
        """As `globalize`, for an output of the graph: the corrected value takes over its name."""
        producer = value.producer()
        assert producer is not None and producer.graph is not None
        last = ir.node("Identity", [value])
        producer.graph.append(last)
        last.replace_input_with(0, self.globalize(last, value))
        result = last.outputs[0]
        hand_over(value, result, "part")
        result.shape = value.shape
        return result

    def localize(self, node: ir.Node, value: ir.Value, sizes: Sizes) -> ir.Value:
        """A shape vector, corrected to the rank's sizes of these axes; new nodes are inserted before `node`."""
        tensor = value.const_value if value.is_initializer() else None
        if tensor is not None:
            old = tensor.numpy()
            new = constant_sizes(self.editor.shards, np.atleast_1d(old), sizes, operator_of(node).sizes_are_offsets)
            return value if np.array_equal(np.atleast_1d(old), new) else self.editor.constant(new.reshape(old.shape))
        entries = self._entries(value)
        wanted = list(sizes)[: len(entries)]
        corrections = [self._correction(have, want) for have, want in zip(entries, wanted, strict=False)]
        if all(correction == _SAME for correction in corrections):
            return value
        producer = value.producer()
        if producer is not None and producer.op_type == "Concat":
            return self._localize_entries(node, producer, wanted)
        return self._correct(node, value, corrections)

    def _localize_entries(self, node: ir.Node, concat: ir.Node, wanted: Sizes) -> ir.Value:
        parts = []
        start = 0
        for part in concat.inputs:
            assert part is not None
            length = self.length_of(part)
            parts.append(self.localize(node, part, wanted[start : start + length]))
            start += length
        if parts == list(concat.inputs):
            return concat.outputs[0]
        return self._emit(node, "Concat", parts, axis=0)

    def _correction(self, have: Axis | None, want: Axis | None) -> _Correction:
        """The correction from the rank's size of axis `have` to that of `want`. None is the size of a whole value."""
        wanted, held = self._ratio(want), self._ratio(have)
        if wanted is None or held is None:
            return _Correction(size=self.editor.shards.size(want) if want is not None else ax.size_of(have or ()))
        times, over = wanted[0] * held[1], wanted[1] * held[0]
        return _SAME if times == over else _Correction(times, over)

    def _ratio(self, axis: Axis | None) -> tuple[int, int] | None:
        """The ratio of the rank's size of an axis to the whole size; None if the rank's size is 0."""
        return (1, 1) if axis is None or not self.editor.shards.is_split(axis) else self.editor.shards.ratio(axis)

    def _correct(self, node: ir.Node, value: ir.Value, corrections: Sequence[_Correction]) -> ir.Value:
        """Correct the entries that are sizes. Others (-1, or 1 for a broadcast axis) are not divisible, and stay."""
        scalar = self.axes_of(value) == ()
        dtype = value.dtype.numpy() if value.dtype is not None else np.dtype(np.int64)

        def vector(numbers: Sequence[int]) -> ir.Value:
            return self.editor.constant(np.array(numbers[0] if scalar else numbers, dtype))

        result = value
        if any((correction.times, correction.over) != (1, 1) for correction in corrections):
            times, over = ([getattr(c, of) for c in corrections] for of in ("times", "over"))
            units = self._emit(node, "Div", [value, vector(over)])
            # Not by Mod, which older opsets than 10 do not have.
            divides = self._emit(node, "Equal", [self._emit(node, "Mul", [units, vector(over)]), value])
            result = self._emit(node, "Mul", [units, vector(times)])
            result = self._choose(node, divides, result, value)
        replaced = [correction.size is not None for correction in corrections]
        if any(replaced):
            mask = self.editor.constant(np.array(replaced[0] if scalar else replaced))
            sizes = vector([correction.size or 0 for correction in corrections])
            result = self._choose(node, mask, sizes, result)
        return result

    def _choose(self, node: ir.Node, mask: ir.Value, one: ir.Value, other: ir.Value) -> ir.Value:
        """The entries of `one` where the mask is true, else those of `other`. Before opset 9 there is no Where."""
        if self.editor.graph.opset_imports.get("", 17) >= WHERE:
            return self._emit(node, "Where", [mask, one, other])
        flags = self.editor.before(node, "Cast", mask, dtype=other.dtype, to=other.dtype or ir.DataType.INT64)
        return self._emit(node, "Add", [self._emit(node, "Mul", [flags, self._emit(node, "Sub", [one, other])]), other])

    def _emit(self, before: ir.Node, kind: str, inputs: Sequence[ir.Value], **attributes: Any) -> ir.Value:
        result = self.editor.before(before, kind, *inputs, **attributes)
        result.type = ir.TensorType(ir.DataType.BOOL) if kind == "Equal" else inputs[-1].type
        return result


def constant_sizes(shards: Shards, old: Array, sizes: Sizes, offsets: bool) -> Array:
    """Replace whole sizes by the rank's. Other numbers (-1, 0, 1 for broadcast axes) stay unless they are `offsets`.

    Negative offsets count from the end: their axis is what lies behind them.
    """
    new: Array = old.copy()
    for number, axis in enumerate(sizes):
        if axis is not None and shards.is_split(axis) and (offsets or old[number] == ax.size_of(axis)):
            new[number] = -shards.size(axis) if offsets and old[number] < 0 else shards.size(axis)
    return new


def local_attribute(shards: Shards, node: ir.Node, name: str, sizes: Sizes) -> ir.Attr:
    """An attribute of one or several sizes, with whole sizes replaced by the rank's."""
    attribute = node.attributes[name]
    if attribute.type == ir.AttributeType.INT:
        return ir.AttrInt64(name, int(constant_sizes(shards, np.array([attribute.as_int()]), sizes, False)[0]))
    old = np.array(attribute.as_ints())
    return ir.AttrInt64s(name, constant_sizes(shards, old, sizes, operator_of(node).sizes_are_offsets).tolist())
