"""Computes multi-head latent attention on its cached latents, by absorbed projections.

Multi-head latent attention (DeepSeek-V2, 2024) caches one narrow vector, the latent, for each token. A product projects
it to all heads' keys and values. Exporters project all cached tokens in each request. But q (W C) is (q W) C, and the
weighted sum of C W is the weighted sum of C, times W. So the queries and the results are projected instead, only those
of new tokens: the paper calls the projections absorbed. A part of the keys that all heads share, such as the one with
rotary embedding, is multiplied as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import onnx_ir as ir

from splitc.compiler.attention.attention import Attention
from splitc.compiler.attention.bias import write_bias
from splitc.compiler.attention.frame import Frame
from splitc.compiler.attention.multi_head import Writing, check_attention
from splitc.compiler.caches.cache import Caches
from splitc.compiler.caches.latent_cache import LatentCaches
from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.lazy_tensors import computed
from splitc.compiler.graphs.matching import VIEWS, is_onnx, made_by, own_matrix, tensor_of, value_before
from splitc.compiler.graphs.walks import reached
from splitc.compiler.nodes import MICROSOFT, inputs_of
from splitc.compiler.patterns.context import Context
from splitc.compiler.patterns.errors import NotFusedError
from splitc.compiler.patterns.operand import SWAP_HEADS, Operand, traced_back, traced_back_merged
from splitc.compiler.patterns.sizes import ONE, Sizes, fixed_axis, joined, product_of, size_readers
from splitc.compiler.patterns.writing import Writer
from splitc.runtime.arrays.array import Array

OPERATOR = "FusedMatMul"
# Operators that may stand between the projection and the attention.
PASSED = {*VIEWS, "Transpose", "Split", "Concat", "Mul", "Div", "Expand"}


@dataclass(frozen=True)
class Projected:
    """Keys or values: `latent` times some `columns` of each head in `weight` [rank, heads x width].

    `axis` is the weight's axis of columns: 1, or 0 if a Transpose follows the weight.
    """

    latent: ir.Value
    weight: ir.Value
    axis: int
    product: ir.Node
    columns: slice

    @property
    def size(self) -> int:
        return int(self.columns.stop - self.columns.start)


@dataclass(frozen=True)
class LatentAttention:
    """An attention whose `values`, and some `parts` of its keys, are projected from a latent of `rank` numbers.

    The other parts of the keys are [batch, 1, all, size], shared by all heads. `sizes` are the head sizes of the parts.
    Scores are scaled by `factor`.
    """

    attention: Attention
    query: Operand
    parts: tuple[Projected | ir.Value, ...]
    sizes: tuple[int, ...]
    values: Projected
    rank: int
    factor: float

    @property
    def latent(self) -> ir.Value:
        return self.values.latent

    @property
    def shared(self) -> list[ir.Value]:
        """The parts of the keys that all heads share."""
        return [part for part in self.parts if isinstance(part, ir.Value)]

    def gains(self, new: int) -> bool:
        """Whether absorbed projections take fewer operations for `new` tokens after a long cache."""
        projected = [*(part for part in self.parts if isinstance(part, Projected)), self.values]
        width = sum(part.size for part in projected)
        return self.rank * width > new * (len(projected) * self.rank - width)


def find_latent(attention: Attention, caches: Caches, sizes: Sizes) -> LatentAttention | None:
    """The attention with the cached latent that its keys and values are projected from; None if there is none."""
    keys = traced_back_merged(attention.keys.swapped(), sizes, scaled=True)
    query = traced_back_merged(attention.query, sizes, scaled=True)
    values = _projected(traced_back_merged(attention.values, sizes), sizes)
    if values is None or values.latent not in caches or len(keys.axes) != 4 or len(query.axes) != 4:
        return None
    node, last = made_by(keys.value, "Concat"), keys.axes[-1]
    if node is not None and node.attributes.get_int("axis", 0) not in (last, last - 4):
        return None
    joined_parts = [keys.value] if node is None else inputs_of(node)
    maybe = (_part(Operand(value, keys.axes), sizes) for value in joined_parts)
    parts = tuple(part for part in maybe if part is not None)
    sizes_of_parts = [axes[last].fixed for value in joined_parts if (axes := sizes.axes(value))]
    fixed = tuple(size for size in sizes_of_parts if size is not None)
    latents = {part.latent for part in parts if isinstance(part, Projected)}
    if not len(parts) == len(fixed) == len(joined_parts) or latents != {values.latent}:
        return None
    rank = int(tensor_of(values.weight).shape.numpy()[1 - values.axis])
    factor = query.factor * keys.factor * attention.scale
    return LatentAttention(attention, query, parts, fixed, values, rank, factor)


def _part(operand: Operand, sizes: Sizes) -> Projected | ir.Value | None:
    """A part of the keys: one that is projected from a latent, or one that all heads share, [batch, 1, all, size]."""
    if (projected := _projected(operand, sizes)) is not None:
        return projected
    traced = traced_back(operand)
    if (source := value_before(traced.value, "Expand")) is not None:
        traced = Operand(source, traced.axes)
    own = sizes.of(traced.value)
    return traced.value if own is not None and len(own) == 4 and traced.is_value and own[1] == ONE else None


def _projected(operand: Operand, sizes: Sizes) -> Projected | None:
    """The projection of a latent to heads [batch, heads, rows, size]; None if the operand is none."""
    traced = traced_back(operand)
    start, own = 0, sizes.axes(traced.value)
    if own is None or len(own) != 4 or len(traced.axes) != 4:
        return None
    size = own[traced.axes[-1]].fixed
    node = made_by(traced.value, "Split")
    if node is not None and node.inputs[0] is not None:
        before = node.outputs[: node.outputs.index(traced.value)]
        fixed = [axes[traced.axes[-1]].fixed for part in before if (axes := sizes.axes(part))]
        counts = [count for count in fixed if count is not None]
        is_last = node.attributes.get_int("axis", 0) in (traced.axes[-1], traced.axes[-1] - 4)
        if not is_last or len(counts) != len(before):
            return None
        start = sum(counts)
        traced = traced_back(Operand(node.inputs[0], traced.axes))
    divided, product = sizes.of(traced.value), made_by(value_before(traced.value, *VIEWS), "MatMul")
    if traced.axes != SWAP_HEADS or divided is None or product is None or size is None:
        return None
    latent, weight = product.inputs
    made, rows = sizes.of(product.outputs[0]), None if latent is None else sizes.of(latent)
    stored = None if weight is None else own_matrix(weight)
    if latent is None or stored is None or made is None or rows is None:
        return None
    width = product_of(divided[2:])
    wanted = [size for size in (*divided[:2], width) if size != ONE]
    if [size for size in made if size != ONE] != wanted or made[-1] != width or len(rows) not in (3, 4):
        return None
    return Projected(latent, *stored, product, slice(start, start + size))


def write_latent(latent: LatentAttention, context: Context, kept: LatentCaches | None = None) -> None:
    """Compute the attention on the latent, in place. Its caches are kept in place if they are given.

    Raises NotFusedError if that would compute something else; then nothing is changed.
    """
    attention = latent.attention
    is_more = attention.softcap or attention.is_causal or attention.row_scales or attention.sinks is not None
    if is_more or attention.groups != 1 or attention.is_flat:
        raise NotFusedError("its scores are not only scaled and masked (it has a softcap, sinks or shared key heads)")
    shared = [part if isinstance(part, ir.Value) else part.weight for part in (*latent.parts, latent.values)]
    if {value.dtype for value in (latent.latent, *shared)} != {latent.query.value.dtype}:
        raise NotFusedError("its latent and its queries differ in type")
    sources = [latent.latent, latent.query.value, *context.editor.graph.inputs]
    if kept is not None:
        sources = [latent.query.value, *kept.lengths.read]
    work = Writer.of(attention.result, context, *sources, name=attention.output.name)
    work = work if kept is None else replace(work, known=kept.filled.known)
    frame = check_attention(attention, work)
    if frame.divided(frame.leading) != 1 or frame.divided(frame.weighed) != 1 or len(frame.leading) != 2:
        raise NotFusedError("its batch and its heads are not one axis each")
    if sum(latent.sizes) != frame.size or latent.values.size != frame.value_size:
        raise NotFusedError("the heads projected from its latent differ from those of its queries")
    ends = {attention.output.producer(), *(value.producer() for value in attention.passed)}
    stale = list(_between(latent, ends, () if kept is None else kept.presents))
    writing = Writing(attention, frame, work)
    if kept is not None:
        kept.check([*stale, *attention.passed])
        with work.undone_if_refused():
            made, *presents = _attended(latent, writing, kept)
        kept.replace(presents, [*stale, *attention.passed], work)
    else:
        readers = size_readers(*stale)
        if not all(map(work.can_read_elsewhere, readers)):
            raise NotFusedError("a node reads sizes of its keys or values that no other value has")
        with work.undone_if_refused():
            (made,) = _attended(latent, writing, None)
        for node in readers:
            replace(work, name=node.outputs[0].name or "").read_elsewhere(node, "sizes")
    writing.replace(attention.result, made, attention.order)


def _between(
    latent: LatentAttention, ends: Collection[ir.Node | None], caches: Collection[ir.Value]
) -> Iterator[ir.Value]:
    """The values from the projections, or from these caches, to the attention.

    Raises NotFusedError if anything else reads them.
    """
    parts = [part for part in (*latent.parts, latent.values) if isinstance(part, Projected)]
    products = dict.fromkeys(part.product for part in parts)

    def below(value: ir.Value) -> list[ir.Value]:
        users = [node for node, _ in value.uses() if node not in ends and not is_onnx(node, "Shape")]
        known = all(is_onnx(node, *PASSED) or node in products for node in users)
        if not known or (value.is_graph_output() and value not in caches):
            raise NotFusedError("keys or values projected from its latent have other readers")
        return [made for node in users for made in node.outputs]

    return reached([*caches] or [value for product in products for value in product.outputs], below)


def _attended(latent: LatentAttention, writing: Writing, kept: LatentCaches | None) -> Sequence[ir.Value]:
    """The attention's result, [batch, heads, length, value size]. If the caches are kept, also their presents."""
    frame, work, like = writing.frame, writing.work, latent.query.value
    query, rank, asked = [frame.batch, frame.heads, frame.length], fixed_axis(latent.rank), list[ir.Value]()
    for number, (part, own) in enumerate(zip(latent.parts, _queries(latent, frame, work), strict=True)):
        if isinstance(part, Projected):
            weight = _by_heads(part, frame.head_count, True, work.editor)
            own = work.add(f"query{number}", "MatMul", [own, weight], like, [*query, rank])
        asked.append(own)
    if kept is None:
        weighed, presents = _weighed(latent, asked, writing), []
    else:
        by_kind = sorted(zip(latent.parts, asked, strict=True), key=lambda pair: isinstance(pair[0], Projected))
        weighed, *presents = kept.attend([own for _, own in by_kind], latent.rank, latent.factor, writing)
    weight = _by_heads(latent.values, frame.head_count, False, work.editor)
    made = work.add("values", "MatMul", [weighed, weight], like, [*query, fixed_axis(frame.value_size)])
    made = writing.blanked(made) if kept is None else made
    return work.cast(made, writing.attention.output, "as_written"), *presents


def _weighed(latent: LatentAttention, asked: Sequence[ir.Value], writing: Writing) -> ir.Value:
    """The weighed sum of the latents for each head, [batch, heads, length, rank], by products with them.

    `asked` are the queries, one for each part of the keys.
    """
    attention, frame, work, like = latent.attention, writing.frame, writing.work, latent.query.value
    query, rank = [frame.batch, frame.heads, frame.length], fixed_axis(latent.rank)
    # The queries of all heads are rows of one matrix, so that each product reads the latent once.
    rows = [frame.batch, fixed_axis(1), joined([frame.heads, frame.length])]
    shared, summands = _with_heads(latent.latent, work), list[ir.Value]()
    for number, (part, own) in enumerate(zip(latent.parts, asked, strict=True)):
        keys = part if isinstance(part, ir.Value) else shared
        own = work.reshape(own, [*rows, work.axes(own)[-1]], f"query{number}_rows")
        how = {"transB": 1, "alpha": latent.factor}
        scores = work.add(f"scores{number}", OPERATOR, [own, keys], like, [*rows, frame.all], domain=MICROSOFT, **how)
        summands.append(scores)
    total = reduce(lambda a, b: work.add("scores", "Add", [a, b], like, [*rows, frame.all]), summands)
    total = work.reshape(total, [*query, frame.all], "scores_by_heads")
    if attention.biases:
        total = work.add("biased", "Add", [total, write_bias(attention, frame, work)], like, [*query, frame.all])
    weights = writing.guarded(work.add("weights", "Softmax", [total], like, [*query, frame.all], axis=-1))
    weights = work.reshape(weights, [*rows, frame.all], "weights_rows")
    weighed = work.add("weighed", "MatMul", [weights, shared], like, [*rows, rank])
    return work.reshape(weighed, [*query, rank], "weighed_by_heads")


def _with_heads(value: ir.Value, work: Writer) -> ir.Value:
    """A latent as [batch, 1, all, rank]."""
    axes = work.axes(value)
    return value if len(axes) == 4 else work.reshape(value, [axes[0], fixed_axis(1), *axes[1:]], "latent")


def _queries(latent: LatentAttention, frame: Frame, work: Writer) -> Sequence[ir.Value]:
    """The parts of the queries [batch, heads, length, size], one for each part of the keys."""
    query = latent.query
    leading = [frame.batch, frame.heads, frame.length]
    node, last = made_by(query.value, "Concat"), query.axes[-1]
    if node is not None and node.attributes.get_int("axis", 0) in (last, last - 4):
        parts = inputs_of(node)
        if [work.axes(value)[last].fixed for value in parts] == [*latent.sizes]:
            return [work.transpose(Operand(value, query.axes), "query") for value in parts]
    value = work.transpose(query, "query")
    if len(latent.parts) == 1:
        return [value]
    made = []
    for number, count in enumerate(latent.sizes):
        begin = sum(latent.sizes[:number])
        bounds = map(work.editor.numbers, (begin, begin + count, 3))
        made.append(work.add("query", "Slice", [value, *bounds], value, [*leading, fixed_axis(count)]))
    return made


def _by_heads(part: Projected, heads: int, transposed: bool, editor: Editor) -> ir.Value:
    """A projection's weight as [heads, rank, columns]; `transposed`: [heads, columns, rank]."""
    tensor, columns = tensor_of(part.weight), part.columns
    rows, count = int(tensor.shape.numpy()[1 - part.axis]), columns.stop - columns.start

    def chosen(array: Array) -> Array:
        matrix = array if part.axis == 1 else array.T
        by_heads = matrix.reshape(rows, heads, -1)[:, :, columns]
        return np.transpose(by_heads, (1, 2, 0) if transposed else (1, 0, 2))

    shape = [heads, count, rows] if transposed else [heads, rows, count]
    return editor.weight(computed(tensor, shape, f"{part.weight.name}[{columns.start}:{columns.stop}]", chosen))
