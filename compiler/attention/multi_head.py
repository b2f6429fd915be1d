"""Writes attention as ONNX Runtime's operator MultiHeadAttention, which has kernels for CPUs and for CUDA.

Its inputs are queries [batch, length, heads x size], keys and values [batch, all, heads x size] or [batch, heads, all,
size], and a bias [batch or 1, heads or 1, length, all]. Its output is [batch, length, heads x value size]. See
com.microsoft.MultiHeadAttention in ONNX Runtime's ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import onnx_ir as ir

from splitc.compiler.attention.attention import Attention
from splitc.compiler.attention.bias import check_bias, write_bias
from splitc.compiler.attention.frame import Frame, find_frame
from splitc.compiler.attention.scores import RowScale
from splitc.compiler.graphs.matching import VIEWS, is_onnx
from splitc.compiler.nodes import MICROSOFT
from splitc.compiler.patterns.context import Context
from splitc.compiler.patterns.errors import NotFusedError
from splitc.compiler.patterns.operand import SWAP_HEADS, Operand, as_operand, axes_of, traced_back_merged, unmerged
from splitc.compiler.patterns.sizes import ONE, Axis, Sizes, fixed_axis, is_one, size_readers
from splitc.compiler.patterns.writing import Writer

OPERATOR = "MultiHeadAttention"


@cache
def has_attribute(operator: str, attribute: str) -> bool:
    """Whether an operator of the installed ONNX Runtime's own has an attribute, which older ones may lack."""
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    schemas = (schema for schema in get_all_operator_schema() if (schema.domain, schema.name) == (MICROSOFT, operator))
    return any(attribute in schema.attributes for schema in schemas)


def write_multi_head_attention(attention: Attention, context: Context) -> None:
    """Replace an attention by the operator, in place.

    Raises NotFusedError if the operator can't express the attention, or if its heads are too large for it to be faster;
    then nothing is changed.
    """
    if attention.softcap:
        raise NotFusedError("the operator has no softcap (Tanh)")
    if attention.sinks is not None:
        raise NotFusedError("the operator takes no attention sinks")
    if attention.groups != 1:
        raise NotFusedError("its query heads share key heads, which the operator does not support")
    if attention.keys.value.producer() is attention.output.producer():
        raise NotFusedError("it is an operator that appends to its cache itself")
    sizes, largest = context.sizes, context.gains.largest_head
    traced = [traced_back_merged(operand, sizes, scaled=True) for operand in (attention.query, attention.keys)]
    before = unmerged(traced[0], sizes, scaled=True)
    # Sizes are preferably read off other values: an input whose size is read has to be on each device.
    sources = [*(operand.value for operand in (*traced, before) if operand is not None), *context.editor.graph.inputs]
    work = Writer.of(attention.result, context, *sources, name=attention.output.name)
    frame = check_attention(attention, work)
    if max(frame.size, frame.value_size) > largest:
        raise NotFusedError(f"no kernel is faster for heads larger than {largest}")
    writing = Writing(attention, frame, work)
    with work.undone_if_refused():
        views = writing.views(writing.rows())
    # Otherwise the decomposed scores would be computed for their sizes. Readers of the output may stay.
    for node in size_readers(*attention.passed, attention.output):
        work.read_elsewhere(node, "scores")
    for old, natural, order in views:
        writing.replace(old, natural, order)


def check_attention(attention: Attention, work: Writer) -> Frame:
    """The axes of an attention. Raises NotFusedError if no fused operator can express the attention."""
    dtypes = {operand.value.dtype for operand in (attention.query, attention.keys, attention.values)}
    if len(dtypes) > 1 or attention.output.dtype is None:
        raise NotFusedError("its queries, keys and values differ in type")
    frame = find_frame(attention, work.sizes)
    for bias in attention.biases:
        check_bias(bias, work.sizes)
    for scale in attention.row_scales:
        _check_scale(scale, frame, work.sizes)
    if not all(map(work.can_read_elsewhere, size_readers(*attention.passed))):
        raise NotFusedError("sizes of its scores are read that its queries and keys do not have, or are an output")
    return frame


def _check_scale(scale: RowScale, frame: Frame, sizes: Sizes) -> None:
    """Raise NotFusedError if a scale of the scores can't be applied to the queries instead."""
    own, scores = (sizes.known(value, "its scores' scale") for value in (scale.value, scale.at))
    if is_one(own):
        return
    leading = [axis.size for axis in frame.leading]
    if own[-1].size != ONE or [axis.size for axis in scores[:-2]] != leading:
        raise NotFusedError("its scores have a different scale for each key")


@dataclass(frozen=True)
class Writing:
    """Adds the operator that replaces an attention, and the nodes around it that adapt its inputs and its output."""

    attention: Attention
    frame: Frame
    work: Writer

    def rows(self) -> ir.Value:
        """Add MultiHeadAttention and its inputs. Returns [batch, length, heads x value size]."""
        attention, frame, work = self.attention, self.frame, self.work
        query = self._query()
        keys = self._fitted(self._traced(attention.keys.swapped()), frame.leading, "keys")
        values = self._fitted(traced_back_merged(attention.values, work.sizes), frame.weighed, "values")
        inputs: list[ir.Value | None] = [
            self.merged(query, frame.size, "query"),
            self.merged(keys, frame.size, "keys"),
            self.merged(values, frame.value_size, "values"),
        ]
        if attention.biases:
            inputs += [None, None, write_bias(attention, frame, work)]
        scale = attention.scale * query.factor * keys.factor
        axes = (frame.batch, frame.length, fixed_axis(frame.head_count * frame.value_size))
        like = attention.query.value
        how = {"num_heads": frame.head_count, "scale": scale, **({"unidirectional": 1} if attention.is_causal else {})}
        return self.finished(work.add("rows", OPERATOR, inputs, like, axes, domain=MICROSOFT, **how))

    def merged_query(self) -> tuple[ir.Value, float]:
        """The queries as [batch, length, heads x size], and a constant factor that is not applied to them yet."""
        query = self._query()
        return self.merged(query, self.frame.size, "query"), query.factor

    def _query(self) -> Operand:
        """The queries, with computed scales applied, and leading axes that are separated into batch and heads."""
        return self._fitted(self._scaled(self._traced(self.attention.query)), self.frame.leading, "query")

    def _traced(self, operand: Operand) -> Operand:
        return traced_back_merged(operand, self.work.sizes, scaled=True)

    def finished(self, made: ir.Value) -> ir.Value:
        """The operator's result, with zeros for NaN and for entirely masked rows if the model has them, in its type."""
        return self.work.cast(self.blanked(self.guarded(made)), self.attention.output, "as_written")

    def guarded(self, made: ir.Value) -> ir.Value:
        """A value with zeros for NaN, if the model replaces NaN of this attention."""
        work, axes = self.work, self.work.axes(made)
        if not self.attention.guarded:
            return made
        nan = work.add("is_nan", "IsNaN", [made], made, axes)
        nan.type = ir.TensorType(ir.DataType.BOOL)
        return work.add("guarded", "Where", [nan, work.editor.scalar(0.0, made), made], made, axes)

    def blanked(self, made: ir.Value) -> ir.Value:
        """A value [batch, rows, width] or [batch, heads, rows, size], with its `blanks` set to zero."""
        work, blanks = self.work, self.attention.blanks
        if blanks is None:
            return made
        rows, axes = blanks.rows, work.axes(made)
        if blanks.hides is not None:
            rows = self._hidden_rows(rows, blanks.hides)
        if len(axes) == 3:
            own = work.axes(rows)
            rows = work.reshape(rows, [own[0], *own[2:]], "blank_rows")
        return work.add("blanked", "Where", [rows, work.editor.scalar(0.0, made), made], made, axes)

    def _hidden_rows(self, mask: ir.Value, hides: bool) -> ir.Value:
        """Whether a mask hides all scores of a row: [batch or 1, 1, length or 1, 1]."""
        work, axes = self.work, self.work.axes(mask)
        if len(axes) != 4 or not is_one(axes[1:2]):
            raise NotFusedError("its attention weights become zero by a mask for each head")
        number = work.add("mask_numbers", "Cast", [mask], mask, axes, to=ir.DataType.FLOAT)
        number.type = ir.TensorType(ir.DataType.FLOAT)
        lists, attributes = work.editor.lists("ReduceMax", axes=[3])
        reduction = ir.node("ReduceMin" if hides else "ReduceMax", [number, *lists], {**attributes, "keepdims": 1})
        work.insert(reduction)
        own = [*axes[:3], fixed_axis(1)]
        work.name_value(reduction.outputs[0], "mask_rows", number, own)
        hidden = work.editor.scalar(1.0 if hides else 0.0, number)
        rows = work.add("hidden_rows", "Equal", [reduction.outputs[0], hidden], mask, own)
        rows.type = ir.TensorType(ir.DataType.BOOL)
        return rows

    def _scaled(self, query: Operand) -> Operand:
        """The queries, multiplied or divided by the computed scales of the scores."""
        for number, scale in enumerate(self.attention.row_scales):
            axes, value = self.work.axes(scale.value), scale.value
            if is_one(axes):
                value = self.work.reshape(value, [], f"scale{number}")
            else:
                query = replace(
                    as_operand(self.work.transpose(query, "query_ordered"), len(query.axes)), factor=query.factor
                )
            if value.dtype != query.value.dtype:
                value = self.work.cast(value, query.value, f"scale{number}_cast")
            operator, like = "Div" if scale.divides else "Mul", query.value
            scaled = self.work.add("query_scaled", operator, [like, value], like, self.work.axes(like))
            query = replace(query, value=scaled)
        return query

    def _fitted(self, operand: Operand, leading: Sequence[Axis], role: str) -> Operand:
        """An operand [..., rows, size], expanded to `leading` axes, which are split into batch and heads if merged."""
        work, frame = self.work, self.frame
        axes = axes_of(operand, self.work.sizes)
        if [axis.size for axis in axes[:-2]] != [axis.size for axis in leading]:
            value = work.expand(work.transpose(operand, f"{role}_ordered"), [*leading, *axes[-2:]], f"{role}_repeated")
            operand = as_operand(value, len(axes), operand.factor)
        if frame.divided(leading) is not None:
            return operand
        before = unmerged(operand, work.sizes, scaled=role != "values")
        if before is not None and frame.divided(axes_of(before, self.work.sizes)[:-2]) is not None:
            return before
        value = work.transpose(operand, f"{role}_ordered")
        value = work.reshape(value, [frame.batch, frame.heads, *axes[-2:]], f"{role}_by_heads")
        return as_operand(value, 4, operand.factor)

    def _natural(self, operand: Operand) -> Operand:
        """An operand as [batch..., rows, heads..., size]."""
        rank = len(operand.axes)
        batch = self.frame.divided(axes_of(operand, self.work.sizes)[:-2])
        assert batch is not None
        return operand.transposed((*range(batch), rank - 2, *range(batch, rank - 2), rank - 1))

    def merged(self, operand: Operand, size: int, role: str) -> ir.Value:
        """An operand as [batch, rows, heads x size]."""
        rows = axes_of(operand, self.work.sizes)[-2]
        value = self.work.transpose(self._natural(operand), f"{role}_by_rows")
        width = fixed_axis(self.frame.head_count * size)
        return self.work.reshape(value, [self.frame.batch, rows, width], role)

    def views(self, made: ir.Value) -> list[tuple[ir.Value, ir.Value, tuple[int, ...]]]:
        """The values that the operator's result replaces: each with a view of the result, and the view's transpose."""
        attention, frame, work = self.attention, self.frame, self.work
        if attention.is_flat:
            return [(attention.result, made, (0, 1, 2))]
        size, weighed = fixed_axis(frame.value_size), frame.weighed
        batch = frame.divided(weighed)
        if batch is not None:
            natural = work.reshape(made, [*weighed[:batch], frame.length, *weighed[batch:], size], "divided")
            count = len(weighed)
            back = (*range(batch), *range(batch + 1, count + 1), batch, count + 1)
            return [(attention.result, natural, tuple(back[axis] for axis in attention.order))]
        natural = work.reshape(made, [frame.batch, frame.length, frame.heads, size], "divided")
        by_heads = [frame.batch, frame.heads, frame.length, size]
        value = work.transpose(Operand(natural, SWAP_HEADS), "by_heads")
        merged = work.reshape(value, [*weighed, frame.length, size], "merged")
        divided = [  # reshapes that separate the merged heads again
            (node.outputs[0], natural, SWAP_HEADS)
            for node in dict.fromkeys(node for node, _ in attention.result.uses())
            if is_onnx(node, *VIEWS) and work.has_sizes(node.outputs[0], by_heads)
        ]
        return [*divided, (attention.result, merged, attention.order)]

    def _same_views(self, value: ir.Value) -> list[ir.Value]:
        """A value, and reshapes of it to the same axes, which torch's exporter adds after an operator."""
        views = [node.outputs[0] for node, _ in value.uses() if is_onnx(node, *VIEWS)]
        own = self.work.sizes.axes(value)
        return [value, *(view for view in views if own is not None and self.work.has_sizes(view, own))]

    def replace(self, old: ir.Value, natural: ir.Value, order: tuple[int, ...]) -> None:
        """Replace `old` by `natural`, transposed by `order`. Readers that transpose back read `natural` itself."""
        for node in [node for value in self._same_views(old) for node, _ in value.uses()]:
            undone = node.attributes.get_ints("perm", ()) if is_onnx(node, "Transpose") else ()
            fits = len(undone) == len(order) and Operand(natural, order).transposed(undone).is_value
            if fits and not node.outputs[0].is_graph_output():
                node.outputs[0].replace_all_uses_with(natural)
        back = self.work.transpose(Operand(natural, order), "output")
        if old is self.attention.result or old.is_graph_output():
            self.work.take_place(back, old)
        else:
            old.replace_all_uses_with(back)
