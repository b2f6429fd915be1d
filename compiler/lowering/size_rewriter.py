"""Shape vectors in a rank's graph, corrected where they hold the wrong of two sizes: a shard's or the whole value's.

A Shape node reads the sizes of the rank's shard. A node that takes sizes (Reshape, Expand) needs those of the rank's
shard of its result. All other readers need the sizes of whole values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from splitc.compiler.frontend.origins import hand_over
from splitc.compiler.lowering.editor import Editor
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Axis
from splitc.compiler.operators.operation import Axes, Operation, Sizes
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.sharding.shards import Shards

Array = npt.NDArray[Any]


@dataclass
class SizeRewriter:
    """Rewrites the nodes of one rank's graph, which must be visited in order.

    `read` maps each shape vector with sizes of shards to the axes whose sizes its entries are.
    """

    shards: Shards
    axes_of: Callable[[ir.Value], Axes]
    length_of: Callable[[ir.Value], int]
    editor: Editor
    read: dict[ir.Value, Sizes] = field(default_factory=dict)
    _whole: dict[ir.Value, ir.Value] = field(default_factory=dict)

    def rewrite(self, node: ir.Node, operation: Operation) -> None:
        """Correct the sizes that a node reads, and record the sizes that it gives."""
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
            self._rewrite_attribute(node, name, sizes)

    def _note_shape(self, node: ir.Node, axes: Axes) -> None:
        if axes is None or not self.shards.splits(axes):
            return
        if node.op_type == "Size":
            self.read[node.outputs[0]] = [tuple(factor for axis in axes for factor in axis)]
            return
        sizes = list(axes)[node.attributes.get_int("start", 0) : node.attributes.get_int("end", None)]
        if any(map(self.shards.is_split, sizes)):
            self.read[node.outputs[0]] = sizes

    def _passed_sizes(self, node: ir.Node) -> Sizes | None:
        """The entries of the node's result, if it passes on sizes of shards by constant indices; None otherwise."""
        if not any(value in self.read for value in node.inputs if value is not None):
            return None
        if node.op_type == "Concat":
            return [each for value in node.inputs if value is not None for each in self._entries(value)]
        data = node.inputs[0]
        if data is None or data not in self.read:
            return None
        entries = list(self.read[data])
        if node.op_type == "Gather":
            places = _numbers(node.inputs[1])
            return None if places is None else [entries[place] for place in places]
        if node.op_type == "Slice":
            bounds = [_numbers(value) for value in node.inputs[1:3]]
            step = _numbers(node.inputs[4]) if len(node.inputs) > 4 else [1]
            if len(bounds) == 2 and bounds[0] and bounds[1] and step == [1]:
                return entries[bounds[0][0] : bounds[1][0]]
            starts = node.attributes.get_ints("starts", None)
            ends = node.attributes.get_ints("ends", None)
            return entries[starts[0] : ends[0]] if starts and ends else None
        return entries

    def _entries(self, value: ir.Value) -> Sizes:
        """For each entry of a shape vector the axis whose size it is, or None if it is not read from a shard."""
        return self.read.get(value) or [None] * self.length_of(value)

    def globalize(self, node: ir.Node, value: ir.Value) -> ir.Value:
        """The shape vector with sizes of whole values."""
        if value not in self.read:
            return value
        if value not in self._whole:
            corrections = [self._ratio(axis, None) for axis in self.read[value]]
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
        """The shape vector with the rank's sizes of these axes, before `node`."""
        tensor = value.const_value if value.is_initializer() else None
        if tensor is not None:
            old = tensor.numpy()
            new = constant_sizes(self.shards, np.atleast_1d(old), sizes, operator_of(node).takes_places)
            return value if np.array_equal(np.atleast_1d(old), new) else self.editor.constant(new.reshape(old.shape))
        entries = self._entries(value)
        wanted = list(sizes)[: len(entries)]
        corrections = [self._ratio(have, want) for have, want in zip(entries, wanted, strict=False)]
        if all(correction is None for correction in corrections):
            return value
        producer = value.producer()
        if producer is not None and producer.op_type == "Concat":
            return self._localize_entries(node, producer, wanted)
        return self._correct(node, value, corrections)

    def _localize_entries(self, node: ir.Node, concat: ir.Node, wanted: Sizes) -> ir.Value:
        parts = []
        start = 0
        for each in concat.inputs:
            assert each is not None
            length = self.length_of(each)
            parts.append(self.localize(node, each, wanted[start : start + length]))
            start += length
        if parts == list(concat.inputs):
            return concat.outputs[0]
        return self._emit(node, "Concat", parts, axis=0)

    def _ratio(self, have: Axis | None, want: Axis | None) -> tuple[int, int] | None:
        """The numbers to multiply and divide by to turn the size `have` into `want`; None if they are the same.

        None for an axis means the size of the whole value. If a section is split there is no ratio: the result is then
        the wanted size itself, over 0.
        """
        times, over = 1, 1
        for axis, wanted in ((want, True), (have, False)):
            if axis is None or not self.shards.is_split(axis):
                continue
            ratio = self.shards.ratio(axis)
            if ratio is None:
                assert want is not None or have is not None
                return (self.shards.size(want) if want is not None else ax.size_of(have or ()), 0)
            own, whole = ratio if wanted else ratio[::-1]
            times, over = times * own, over * whole
        return None if times == over else (times, over)

    def _correct(self, node: ir.Node, value: ir.Value, corrections: Sequence[tuple[int, int] | None]) -> ir.Value:
        """Multiply and divide the entries that are sizes. Others (-1, or 1 for a repeated axis) are not divisible."""
        scalar = self.axes_of(value) == ()
        dtype = value.dtype.numpy() if value.dtype is not None else np.dtype(np.int64)

        def vector(numbers: Sequence[int]) -> ir.Value:
            return self.editor.constant(np.array(numbers[0] if scalar else numbers, dtype))

        fixed = [bool(each) and each[1] == 0 for each in corrections]  # type: ignore[index]  # bool guards it
        times = [each[0] if each and each[1] else 1 for each in corrections]
        over = [each[1] if each and each[1] else 1 for each in corrections]
        result = value
        if any(each != 1 for each in over) or any(each != 1 for each in times):
            scaled = self._emit(node, "Mul", [value, vector(times)])
            result = self._emit(node, "Div", [scaled, vector(over)])
            rest = self._emit(node, "Mod", [value, vector(over)])
            divides = self._emit(node, "Equal", [rest, vector([0] * len(times))])
            result = self._emit(node, "Where", [divides, result, value])
        if any(fixed):
            numbers = [each[0] if each and not each[1] else 0 for each in corrections]
            mask = self.editor.constant(np.array(fixed[0] if scalar else fixed))
            result = self._emit(node, "Where", [mask, vector(numbers), result])
        return result

    def _emit(self, before: ir.Node, kind: str, inputs: Sequence[ir.Value], **attributes: Any) -> ir.Value:
        made = self.editor.before(before, kind, *inputs, **attributes)
        made.type = ir.TensorType(ir.DataType.BOOL) if kind == "Equal" else inputs[-1].type
        return made

    def _rewrite_attribute(self, node: ir.Node, name: str, sizes: Sizes) -> None:
        attribute = node.attributes.get(name)
        if attribute is None:
            return
        if attribute.type == ir.AttributeType.INT:
            old = np.array([attribute.as_int()])
            new = constant_sizes(self.shards, old, sizes, False)
            replacement = ir.AttrInt64(name, int(new[0]))
        else:
            old = np.array(attribute.as_ints())
            new = constant_sizes(self.shards, old, sizes, operator_of(node).takes_places)
            replacement = ir.AttrInt64s(name, [int(each) for each in new])
        if not np.array_equal(old, new):
            node.attributes[name] = replacement


def constant_sizes(shards: Shards, old: Array, sizes: Sizes, positions: bool) -> Array:
    """Replace whole sizes by the rank's. Other numbers (-1, 0, 1 for a repeated axis) stay, unless `positions`."""
    new: Array = old.copy()
    for number, axis in enumerate(sizes):
        if axis is not None and shards.is_split(axis) and (positions or old[number] == ax.size_of(axis)):
            new[number] = shards.size(axis)
    return new


def _numbers(value: ir.Value | None) -> list[int] | None:
    """A constant's whole numbers."""
    tensor = value.const_value if value is not None and value.is_initializer() else None
    return None if tensor is None else [int(each) for each in np.atleast_1d(tensor.numpy())]
