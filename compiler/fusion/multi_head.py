"""Attention as ONNX Runtime's operator MultiHeadAttention, which has kernels on the CPU and on CUDA.

It takes queries [batch, length, heads x size]; keys and values likewise, or both [batch, heads, all, size]; and what is
added to the scores, [batch or 1, heads or 1, length, all]. Its result is [batch, length, heads x size]. See
com.microsoft.MultiHeadAttention in ONNX Runtime's ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.frontend.origins import hand_over
from splitc.compiler.fusion.attention import Attention, NotFusedError
from splitc.compiler.fusion.operand import Operand, find_operand
from splitc.compiler.fusion.sizes import Size, Sizes

DOMAIN, OPERATOR = "com.microsoft", "MultiHeadAttention"
# Orders of four axes: heads and lengths change places; the last two do.
SWAP_HEADS, SWAP_LAST = (0, 2, 1, 3), (0, 1, 3, 2)
# The lowest number of a half: a mask in single precision may have lower ones, which are infinite as halves.
LOWEST_HALF = -65504.0


def write_multi_head_attention(attention: Attention, editor: Editor, sizes: Sizes) -> None:
    """Replace what was found by the operator, in place. `sizes` get those of new values.

    Raises NotFusedError if the operator can't say it; then nothing is changed.
    """
    heads, size = _check(attention, sizes)
    work = _Writing(attention, editor, sizes)
    query = find_operand(attention.query, 4, scaled=True).transposed(SWAP_HEADS)
    keys = find_operand(attention.keys, 4, scaled=True).transposed(SWAP_LAST)
    values = find_operand(attention.values, 4, scaled=False)
    if all(operand.transposed(SWAP_HEADS).is_value for operand in (keys, values)):
        rest = [work.merged(keys.value, "keys"), work.merged(values.value, "values")]
    else:
        rest = [work.ordered(keys, "keys"), work.ordered(values, "values")]
    rows = work.merged(work.ordered(query, "query"), "query")
    inputs = [rows, *rest, *([None, None, work.bias()] if attention.biases else [])]
    scale = attention.scale * query.factor * keys.factor
    made = work.add("rows", OPERATOR, inputs, rows, domain=DOMAIN, num_heads=heads, scale=scale)
    if attention.guarded:
        nan = work.add("is_nan", "IsNaN", [made], rows)
        nan.type = ir.TensorType(ir.DataType.BOOL)
        made = work.add("guarded", "Where", [nan, editor.scalar(0.0, rows), made], rows)
    work.replace(work.divided(made, heads, size))


def _check(attention: Attention, sizes: Sizes) -> tuple[int, int]:
    """The number of heads and their size. Raises NotFusedError if the operator does not fit."""
    queries, keys, values = (sizes.of(value) for value in (attention.query, attention.keys, attention.values))
    if queries is None or keys is None or values is None or not len(queries) == len(keys) == len(values) == 4:
        raise NotFusedError("its queries, keys and values have no four axes of known sizes")
    batch, heads, length, width = queries
    rows = keys[3]
    if keys != (batch, heads, width, rows) or values != (batch, heads, rows, width):
        raise NotFusedError("its queries, keys and values differ in their batches, heads or sizes")
    number, size = sizes.fixed(attention.query, 1), sizes.fixed(attention.query, 3)
    if number is None or size is None:
        raise NotFusedError("the number and the size of its heads may change from request to request")
    for bias in attention.biases:
        shape = sizes.of(bias)
        if shape is None or len(shape) > 4:
            raise NotFusedError("what is added to its scores has no known shape")
        padded = ((1, 1),) * (4 - len(shape)) + shape
        if any(one not in ((1, 1), other) for one, other in zip(padded, (batch, heads, length, rows), strict=True)):
            raise NotFusedError("what is added to its scores has another shape than these")
        if padded[3] != rows:
            raise NotFusedError("what is added to its scores is the same for all keys")
    return number, size


@dataclass(frozen=True)
class _Writing:
    """New nodes before the one that makes an attention's output, named after that."""

    attention: Attention
    editor: Editor
    sizes: Sizes

    @property
    def _at(self) -> ir.Node:
        node = self.attention.output.producer()
        assert node is not None
        return node

    def add(
        self,
        role: str,
        operator: str,
        inputs: Sequence[ir.Value | None],
        like: ir.Value,
        axes: Sequence[tuple[Size, Any]] | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> ir.Value:
        """A new node's result, of the type of `like`, and of its shape if no `axes` are given."""
        value = self.editor.before(self._at, operator, *inputs, domain=domain, **attributes)
        value.name, value.type = f"{self.attention.output.name}/{role}", like.type
        axes = self.axes(like) if axes is None else axes
        self.sizes.put(value, tuple(size for size, _ in axes))
        value.shape = ir.Shape([symbol for _, symbol in axes])
        return value

    def axes(self, value: ir.Value) -> list[tuple[Size, Any]]:
        """The size of each axis, and its symbol or number in the graph."""
        sizes = self.sizes.of(value)
        assert sizes is not None
        symbols = value.shape if value.shape is not None else [None] * len(sizes)
        return list(zip(sizes, symbols, strict=True))

    def ordered(self, operand: Operand, role: str) -> ir.Value:
        """The operand, without its factor, in the order of its axes."""
        if operand.is_value:
            return operand.value
        axes = self.axes(operand.value)
        ordered = [axes[axis] for axis in operand.axes]
        value, order = operand.value, list(operand.axes)
        return self.add(f"{role}_ordered", "Transpose", [value], value, ordered, perm=order)

    def merged(self, value: ir.Value, role: str) -> ir.Value:
        """[batch, length, heads, size] as [batch, length, heads x size]."""
        batch, length, (heads, _), (size, _) = self.axes(value)
        width = heads[0] * size[0]
        shape = self.editor.constant(np.array([0, 0, width], np.int64))
        return self.add(role, "Reshape", [value, shape], value, [batch, length, ((width, width), width)])

    def divided(self, value: ir.Value, heads: int, size: int) -> ir.Value:
        """[batch, length, heads x size] as [batch, length, heads, size]."""
        batch, length, _ = self.axes(value)
        shape = self.editor.constant(np.array([0, 0, heads, size], np.int64))
        axes = [batch, length, ((heads, heads), heads), ((size, size), size)]
        return self.add("divided", "Reshape", [value, shape], value, axes)

    def bias(self) -> ir.Value:
        """All that is added to the scores, with four axes and as many rows as there are queries."""
        first, *others = (self._four(value, f"bias{number}") for number, value in enumerate(self.attention.biases))
        total = first
        for number, other in enumerate(others):
            axes = [a if a[0] != (1, 1) else b for a, b in zip(self.axes(total), self.axes(other), strict=True)]
            total = self.add(f"biases{number}", "Add", [total, other], total, axes)
        query = self.axes(self.attention.query)
        if total.dtype != self.attention.query.dtype:
            total = self._halved(total)
        if self.axes(total)[2][0] == query[2][0]:
            return total
        axes = self.axes(total)
        return self.add("bias_rows", "Expand", [total, self._rows()], total, [*axes[:2], query[2], axes[3]])

    def _four(self, value: ir.Value, role: str) -> ir.Value:
        """A value with four axes, the first of which may be added."""
        axes = self.axes(value)
        lacking = 4 - len(axes)
        if not lacking:
            return value
        ones = self.editor.constant(np.ones(4, np.int64))  # Unsqueeze takes its axes in another way before opset 13
        return self.add(role, "Expand", [value, ones], value, [*[((1, 1), 1)] * lacking, *axes])

    def _halved(self, value: ir.Value) -> ir.Value:
        """What is added in single precision, in the type of the queries."""
        if self.attention.query.dtype == ir.DataType.FLOAT16:
            value = self.add("bias_bounded", "Max", [value, self.editor.scalar(LOWEST_HALF, value)], value)
        dtype = self.attention.query.dtype
        assert dtype is not None
        cast = self.add("bias_cast", "Cast", [value], value, to=dtype)
        cast.type = ir.TensorType(dtype)
        return cast

    def _rows(self) -> ir.Value:
        """[1, 1, length, 1], by which a row for all queries is repeated."""
        all_sizes = self._numbers("query_sizes", "Shape", [self.attention.query], 4)
        length = self._numbers("length", "Gather", [all_sizes, self.editor.constant(np.array([2]))], 1)
        one = self.editor.constant(np.array([1]))
        return self._numbers("bias_sizes", "Concat", [one, one, length, one], 4, axis=0)

    def _numbers(self, role: str, operator: str, inputs: Sequence[ir.Value], count: int, **attributes: Any) -> ir.Value:
        """A list of so many sizes."""
        value = self.add(role, operator, inputs, inputs[0], [((count, count), count)], **attributes)
        value.type = ir.TensorType(ir.DataType.INT64)
        return value

    def replace(self, made: ir.Value) -> None:
        """Put the result, [batch, length, heads, size], in the place of the attention's output."""
        output = self.attention.output
        for node, _ in list(output.uses()):
            order = node.attributes.get_ints("perm", ()) if node.op_type == "Transpose" and not node.domain else ()
            if tuple(order) == SWAP_HEADS and not node.outputs[0].is_graph_output():
                node.outputs[0].replace_all_uses_with(made)
        back = self.ordered(Operand(made, SWAP_HEADS), "output")
        sizes = self.sizes.of(back)
        assert sizes is not None
        output.replace_all_uses_with(back, replace_graph_outputs=True)
        hand_over(output, back, "unfused")  # it may be an output of the model
        self.sizes.put(back, sizes)
