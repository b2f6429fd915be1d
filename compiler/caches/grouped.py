"""Writes attention with its caches as ONNX Runtime's operator GroupQueryAttention, which can write caches in place.

Its inputs are queries [batch, length, heads x size], new keys and values [batch, length, cache heads x size], pasts
[batch, cache heads, capacity, size], the number of filled rows with the new ones, and a bias of the scores. Its outputs
are the result and the presents, which are the pasts with new rows: in the same memory, if the caller binds them so.

With `causal` 0 it computes softmax(scale x queries x keys + bias) x values over the filled rows, and adds no mask of
its own: the model's mask stays as the bias, whatever it hides. See com.microsoft.GroupQueryAttention in ONNX Runtime's
ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_ir as ir

from splitc.compiler.attention.bias import write_bias
from splitc.compiler.attention.frame import Frame
from splitc.compiler.attention.multi_head import Writing, check_attention, has_attribute
from splitc.compiler.caches.cache import ROWS, Cache, CachedAttention, check_layout
from splitc.compiler.caches.lengths import SEVERAL_ROWS, Filled, Lengths
from splitc.compiler.graphs.matching import source_through
from splitc.compiler.nodes import MICROSOFT
from splitc.compiler.patterns.context import Context
from splitc.compiler.patterns.errors import NotFusedError
from splitc.compiler.patterns.operand import PASSED, SWAP_HEADS, traced_back_merged, unmerged, untransposed
from splitc.compiler.patterns.sizes import ONE, fixed_axis, is_one
from splitc.compiler.patterns.writing import Writer

OPERATOR = "GroupQueryAttention"
# The indices of its inputs.
QUERY, KEY, PASTS, LASTS, TOTAL, TABLES, POSITIONS, BIAS, SINKS = 0, 1, (3, 4), 5, 6, (7, 8), 9, 10, 11
# The kernels take head sizes that are multiples of this.
UNIT = 8


def write_group_query_attention(cached: CachedAttention, lengths: Lengths, context: Context) -> None:
    """Replace an attention and its caches by the operator, in place.

    Raises NotFusedError if the operator can't express them; then nothing is changed.
    """
    attention = cached.attention
    filled = lengths.of(cached.keys.past, cached.keys.new, cached.keys.present)
    query = traced_back_merged(attention.query, context.sizes, scaled=True)
    before = unmerged(query, context.sizes, scaled=True)
    sources = [*(operand.value for operand in (query, before) if operand is not None), *lengths.read]
    work = Writer.of(attention.result, context, *sources, name=attention.output.name)
    work = replace(work, known=filled.known)
    frame = _check(cached, work)
    stale = [value for one in (cached.keys, cached.values) for value in (one.past, one.present, *one.between)]
    lengths.check_sizes([*stale, *attention.passed], filled)
    writing = Writing(attention, frame, work)
    with work.undone_if_refused():
        made, keys, values = _write(cached, writing, filled)
        views = writing.views(writing.finished(made))
    lengths.rewrite_sizes([*stale, *attention.passed], filled)
    for old, natural, order in views:
        writing.replace(old, natural, order)
    for one, new in ((cached.keys, keys), (cached.values, values)):
        work.take_place(new, one.present)
    lengths.are_in_place((cached.keys.past, cached.values.past), filled, one_row=True)


def _check(cached: CachedAttention, work: Writer) -> Frame:
    """The attention's axes. Raises NotFusedError if the operator can't express the attention or its caches."""
    frame = check_attention(cached.attention, work)
    keys, values = cached.keys, cached.values
    scales = [work.sizes.axes(scale.value) for scale in keys.scales]
    if not all(axes is not None and is_one(axes) for axes in scales):
        raise NotFusedError("its keys are scaled by a tensor, not by one number")
    layouts = [check_layout(cache, work.sizes) for cache in (keys, values)]
    shapes = [work.sizes.of(value) for cache in (keys, values) for value in (cache.past, cache.new, cache.present)]
    if shapes[:3] != shapes[3:] or layouts[0] != layouts[1]:
        raise NotFusedError("its keys and its values differ in shape")
    heads, times = layouts[0]
    repeated = heads * times * cached.attention.groups
    if frame.head_count != repeated and (heads, times) != (1, 1):  # one head is broadcast as it is
        raise NotFusedError("its cache, with repeated heads, has another number of heads than its queries")
    new, present = work.axes(keys.new), work.axes(keys.present)
    own = (new[0].size, new[-2].size, present[ROWS].size, present[3].fixed)
    if own != (frame.batch.size, frame.length.size, frame.all.size, frame.size):
        raise NotFusedError("the batch or the length of its cache differs from that of its queries")
    if frame.size % UNIT or frame.size != frame.value_size:
        raise NotFusedError(f"the operator takes head sizes that are multiples of {UNIT}, the same of keys and values")
    if keys.new.dtype != cached.attention.query.value.dtype:
        raise NotFusedError("its queries and its cache differ in type")
    if cached.attention.sinks is not None:
        _check_sinks(cached.attention.sinks, frame, work)
    _check_rows(keys, work)
    return frame


def _check_rows(cache: Cache, work: Writer) -> None:
    """Raise NotFusedError if the operator can't run the planned request: a batch of chunks after cached tokens."""
    past, new = work.axes(cache.past), work.axes(cache.new)
    if all(axis.size[0] > least for axis, least in ((new[0], 1), (new[-2], 1), (past[ROWS], 0))):
        raise NotFusedError(
            f"the operator takes either one row or one token a row after cached tokens: {new[0].size[0]} rows of "
            f"{new[-2].size[0]} tokens after {past[ROWS].size[0]} are planned"
        )


def _write(cached: CachedAttention, writing: Writing, filled: Filled) -> Sequence[ir.Value]:
    """Add the operator and its inputs. Returns [batch, length, heads x size], the keys' present and the values'."""
    attention, frame, work = cached.attention, writing.frame, writing.work
    query, factor = writing.merged_query()
    keys, values = (_merged(one, work, role) for one, role in ((cached.keys, "keys"), (cached.values, "values")))
    bias = filled.with_room(write_bias(attention, frame, work), work) if attention.biases else None
    inputs: list[ir.Value | None] = [
        query,
        keys,
        values,
        cached.keys.past,
        cached.values.past,
        filled.lasts,
        filled.total,
    ]
    if bias is not None or attention.sinks is not None:
        inputs += [None, None, None, bias]
    if attention.sinks is not None:
        inputs.append(_sinks(attention.sinks, query, frame, work))
    # Read off the cache, where the number of heads is fixed: that of new keys may be dynamic.
    kv_heads = work.axes(cached.keys.present)[1].fixed or 1
    node = ir.node(
        OPERATOR,
        inputs,
        {
            "num_heads": frame.head_count,
            "kv_num_heads": kv_heads,
            "scale": attention.scale * factor * cached.keys.factor,
            "causal": int(attention.is_causal),
            "softcap": attention.softcap,
        },
        domain=MICROSOFT,
        num_outputs=3,
    )
    if filled.has_branch:
        node.metadata_props[SEVERAL_ROWS] = filled.input.name or ""
    work.insert(node)
    made, *presents = node.outputs
    work.name_value(made, "rows", query, work.axes(query))
    for value, one in zip(presents, (cached.keys, cached.values), strict=True):
        work.name_value(value, "present", one.present, work.axes(one.present))
    return made, *presents


def _check_sinks(sinks: ir.Value, frame: Frame, work: Writer) -> None:
    """Raise NotFusedError if attention sinks are not one number a head."""
    own, source = work.sizes.of(sinks), work.sizes.axes(_unrepeated(sinks))
    if own is None or source is None or not own or own[-1] != ONE or len(own) != 4 or len(source) > 4:
        raise NotFusedError("its attention sinks are more than one number for each row of scores")
    if [axis.fixed for axis in [*[fixed_axis(1)] * (4 - len(source)), *source]] != [1, frame.head_count, 1, 1]:
        raise NotFusedError("its attention sinks are not one number for each head")


def _unrepeated(sinks: ir.Value) -> ir.Value:
    """Attention sinks before their expansion to all rows."""
    return source_through(sinks, "Expand", *PASSED)


def _sinks(sinks: ir.Value, like: ir.Value, frame: Frame, work: Writer) -> ir.Value:
    """Attention sinks as [heads], in the queries' type."""
    value = work.reshape(_unrepeated(sinks), [frame.heads], "sinks")
    return work.cast(value, like, "sinks_cast")


def _merged(cache: Cache, work: Writer, role: str) -> ir.Value:
    """The new rows of a cache, as [batch, length, heads x size]."""
    batch, *_, rows, _ = work.axes(cache.new)
    _, heads, _, size = work.axes(cache.present)
    if len(work.axes(cache.new)) == 4:
        value = work.transpose(untransposed(cache.new, 4).transposed(SWAP_HEADS), f"{role}_by_rows")
    else:
        value = work.reshape(cache.new, [batch, rows, heads, size], f"{role}_by_rows")
    return work.reshape(value, [batch, rows, fixed_axis((heads.fixed or 1) * (size.fixed or 1))], role)


def is_known() -> bool:
    """Whether the installed ONNX Runtime's operator has the attribute `causal`."""
    return has_attribute(OPERATOR, "causal")
