"""Operators for attention and rotary embedding. Their forms are those of ONNX's and ONNX Runtime's specifications.

Letters in patterns: b batch; l new tokens; s and t all tokens; p past tokens; d and e head sizes of keys and of values;
k key-value heads; g query heads for each of them; h heads if there are as many key-value heads as query heads.
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from splitc.compiler.operators import axes as ax
from splitc.compiler.operators import scratch
from splitc.compiler.operators.axes import Axis
from splitc.compiler.operators.gpu_kernels import LATENT
from splitc.compiler.operators.operation import Operation
from splitc.compiler.operators.operator import AxesRule, Operator, Shapes


def _heads(queries: int, keys: int) -> dict[str, Axis] | None:
    """Factors for key-value heads (k) and query heads for each (g); None if the numbers of heads are invalid."""
    if queries <= 0 or keys <= 0 or queries % keys:
        return None
    return {"k": ax.new_axis(keys), "g": ax.new_axis(queries // keys)}


def attention(op: Operation) -> None:
    """ONNX's Attention (opset 23 and later): queries, keys and values [b, heads, l, d] or [b, l, heads x d]."""
    flat = len(op.input(0)) == 3
    if flat:
        queries, keys = op.number("q_num_heads", 0), op.number("kv_num_heads", 0)
    else:
        queries, keys = ax.size_of(op.input(0)[1]), ax.size_of(op.input(1)[1])
    if (heads := _heads(queries, keys)) is None:
        return
    size, value_size = ax.size_of(op.input(0)[-1]), ax.size_of(op.input(2)[-1])
    if flat:
        terms, result = "b l (k g d), b s (k d), b s (k e)", "b l (k g e)"
        size, value_size = size // queries, value_size // keys
        op.attributes.update(q_num_heads=[(*heads["k"], *heads["g"])], kv_num_heads=[heads["k"]])
    else:
        terms, result = "b (k g) l d, b k s d, b k s e", "b (k g) l e"
    op.pattern(
        f"{terms}, b (k g) l t, b k p d, b k p e, b -> {result}, b k t d, b k t e, b (k g) l t",
        whole="dlspt",
        known={**heads, "d": ax.new_axis(size), "e": ax.new_axis(value_size)},
    )


def group_query_attention(op: Operation) -> None:
    """Queries [b, l, heads x d]. If keys and values are not given, they are packed into the same tensor."""
    queries, keys = op.number("num_heads", 0), op.number("kv_num_heads", 0)
    if (heads := _heads(queries, keys)) is None:
        return
    packed = not op.has(1)
    width = ax.size_of(op.input(0)[-1])
    head = ax.new_axis(width // (queries + 2 * keys if packed else queries))
    query = "b l (k g d + k d + k d), -, -" if packed else "b l (k g d), b l (k d), b l (k d)"
    op.pattern(
        f"{query}, b k p d, b k p d, b, -, -, -, b l, b (k g) l t, (k g), (k d), (k d) "
        "-> b l (k g d), b k t d, b k t d, b (k g) l t",
        whole="dlpt",
        known={**heads, "d": head},
    )
    op.attributes.update(num_heads=[(*heads["k"], *heads["g"])], kv_num_heads=[heads["k"]])


def latent_attention(op: Operation) -> None:
    """Attention on latents and shared keys, which all heads share, with their caches (caches/latent_cache.py)."""
    op.pattern(
        "b h l e, b k l d, b k l e, b k p d, b k p e, b, -, b h l d, -, -, b h l t -> b h l e, b k t d, b k t e",
        whole="delptk",
    )
    op.attributes["num_heads"] = [op.input(0)[1]]


def multi_head_attention(op: Operation) -> None:
    """Queries [b, l, heads x d]; or queries, keys and values packed as [b, l, heads, 3, d]."""
    count = op.number("num_heads", 0)
    if count <= 0:
        return
    heads = ax.new_axis(count)
    rank, value, e = len(op.input(0)), op.input(2) if op.has(2) else (), "e"
    width = ax.size_of(op.output()[-1]) // count
    if rank == 5:
        query, head = "b l h 3 d, -, -", ax.size_of(op.input(0)[-1])
    else:
        head = ax.size_of(op.input(0)[-1]) // count
        if op.has(1) and len(op.input(1)) == 5:
            query = "b l (h d), b s h 2 d, -"
        elif len(value) == 4:  # the kernel requires values of the keys' size here
            query, e = "b l (h d), b h s d, b h s d", "d"
        else:
            query = "b l (h d), b s (h d), b s (h e)"
    op.pattern(
        f"{query}, (h d + h d + h {e}), {_mask(op, 4)}, b h l t, b h p d, b h p {e} "
        f"-> b l (h {e}), b h t d, b h t {e}, b h l t",
        whole="dlspt23",
        known={"h": heads, "e": ax.new_axis(width), "d": ax.new_axis(head)},
    )
    op.attributes["num_heads"] = [heads]


def fused_attention(op: Operation) -> None:
    """com.microsoft.Attention: it includes the projection to queries, keys and values; both pasts are one tensor.

    QAttention computes it of integers, whose scales and zero points are one, or one a column.
    """
    count = op.number("num_heads", 0)
    if count <= 0:
        return
    heads = ax.new_axis(count)
    widths = op.numbers_of("qkv_hidden_sizes") or [ax.size_of(op.input(1)[-1]) // 3] * 3
    if widths[0] != widths[1] or any(width % count for width in widths):
        return
    head, columns = ax.new_axis(widths[0] // count), "(h d + h d + h e)"
    # Values have a width of their own, which may be sharded, only where the attribute says it.
    value = ax.new_axis(widths[2] // count) if op.numbers_of("qkv_hidden_sizes") else head
    if op.node.op_type == "QAttention":
        scales, zeros = (columns if op.has(number) and op.input(number) else "-" for number in (4, 7))
        others = f"-, {scales}, {_mask(op, 5)}, -, {zeros}, 2 b h p d"
    else:
        others = f"{_mask(op, 3)}, 2 b h p d, b h l t"
    op.pattern(
        f"b l i, i {columns}, {columns}, {others} -> b l (h e), 2 b h t d",
        whole="ildpt2m",
        known={"h": heads, "d": head, "e": value},
    )
    op.attributes["num_heads"] = [heads]
    if op.numbers_of("qkv_hidden_sizes"):
        op.attributes["qkv_hidden_sizes"] = [(*heads, *head), (*heads, *head), (*heads, *value)]


def rotary_embedding(op: Operation) -> None:
    """Rotary embedding of [b, heads, l, d] or [b, l, heads x d], or of only the first 2 x r elements of each head.

    Cosines and sines are tables with a row for each position. Positions are [b, l], or only the first one, [1]. If that
    is 0, and the tables have exactly one row per position, a shard of positions reads its shard of the tables. ONNX's
    own operator also takes cosines and sines as [b, l, r].
    """
    data = op.input(0)
    flat = len(data) == 3
    columns = op.input(2 if op.node.domain else 1)[-1]
    count = op.number("num_heads", 0)
    if flat and count <= 0:
        # Exporters give num_heads only if the head is wider than the rotated part.
        rotated = 2 * ax.size_of(columns)
        count = ax.size_of(data[-1]) // rotated if ax.size_of(data[-1]) % rotated == 0 else 0
    if flat and count <= 0:
        return
    known = {"h": ax.new_axis(count) if flat else data[1], "2": ax.new_axis(2), "r": columns}
    head = ax.size_of(data[-1]) // (count if flat else 1)
    term = "2 r"
    if head != 2 * ax.size_of(columns):
        known["d"], term = ax.new_axis(head), "d"
    others, rows = _rotary_tables(op)
    text = "b l (h {d}), {o} -> b l (h {d})" if flat else "b h l ({d}), {o} -> b h l ({d})"
    op.pattern(text.format(d=term, o=others), whole=f"2rd{rows}", known=known)
    if op.number("num_heads", 0):
        op.attributes["num_heads"] = [known["h"]]
    if op.number("rotary_embedding_dim", 0):
        op.attributes["rotary_embedding_dim"] = [(*known["2"], *columns)]


def _rotary_tables(op: Operation) -> tuple[str, str]:
    """The terms of a rotary embedding's other inputs, and the letters of axes that it needs whole.

    Tables that are indexed by given positions are related by sharding/row_numbers.py, where positions are computed.
    """
    if not op.node.domain:
        return ("b l r, b l r, -", "") if len(op.input(1)) == 3 else ("r, r, b l", "")
    if len(op.input(1)) != 1:
        return "b l, r, r", ""
    follows = op.numbers(1) == [0] and ax.size_of(op.input(2)[0]) == ax.size_of(op.input(0)[-2])
    return ("-, l r, l r", "") if follows else ("-, r, r", "l")


def _mask(op: Operation, number: int) -> str:
    """The term of a mask input: lengths [b], or a mask [b, t], [b, l, t], or [b, 1, m, m] for lengths up to m."""
    return ["-", "b", "b t", "b l t", "b h m m"][len(op.input(number))] if op.has(number) else "-"


def key_lengths(op: Operation, number: int) -> int | None:
    """Example lengths for attention with caches: those of the whole cache, since kernels leave other rows unset.

    They include the new tokens: with less, a loop of ONNX Runtime 1.23 starts below zero and never ends.
    """
    new = ax.size_of(op.input(0)[-2])
    keys = max(new, ax.size_of(op.output(1)[2])) if op.has_output(1) else new
    return {5: keys - 1, 6: keys}.get(number)


def cache_sizes(node: ir.Node) -> dict[int, int]:
    """The fixed sizes of GroupQueryAttention's caches by axis: heads, head size, and rows of sliding-window caches.

    Files may have symbols for these, though kernels take one size. Caches of another type than the queries are packed:
    their head size is not known.
    """
    query, key, past = node.inputs[0], node.inputs[1], node.inputs[3]
    heads, own = (node.attributes.get_int(name, 0) for name in ("num_heads", "kv_num_heads"))
    sizes = {1: own} if own > 0 else {}
    width = query.shape[-1] if query is not None and query.shape else None
    heads += 0 if key is not None else 2 * own
    if isinstance(width, int) and heads > 0 and past is not None and query is not None and past.dtype == query.dtype:
        sizes[3] = width // heads
    window = node.attributes.get_int("local_window_size", -1)
    if node.attributes.get_int("sliding_window_cache", 0) and window > 0:
        sizes[2] = window
    return sizes


def first_position(op: Operation, number: int) -> int | None:
    """An example first position: 0, since the tables may have no further rows, and kernels would read beyond them."""
    return 0 if number == 1 and len(op.input(1)) < 2 else None


def attention_flops(node: ir.Node, inputs: Shapes, outputs: Shapes) -> int:
    """2 x output elements x keys for each of the products queries x keys and scores x values; plus a projection."""
    output = outputs[0] if outputs else ()
    weight = inputs[1] if len(inputs) > 1 else ()
    projection = 2 * math.prod(output[:-1]) * math.prod(weight) if len(weight) == 2 else 0
    return 4 * math.prod(output) * _count_keys(inputs, outputs) + projection


def _count_keys(inputs: Shapes, outputs: Shapes) -> int:
    """The number of keys: of the input [b, s, heads x d], [b, heads, s, d] or packed [b, s, heads, 2, d], or cached.

    Keys that are packed with the queries are as many as these. A cache holds past and new keys, and spare capacity.
    """
    packed = len(inputs) < 2 or len(inputs[1]) < 3
    given = inputs[0 if packed else 1] if inputs else ()
    own = given[2] if len(given) == 4 else given[1] if len(given) > 2 else 1
    return max(own, *(shape[-2] for shape in outputs[1:3] if len(shape) > 3), 1)


def _attention(name: str, axes: AxesRule | None = None, **more: Any) -> Operator:
    """An entry for attention. Its kernels for half precision on GPUs keep scores in registers: no scratch."""
    more = {"half_scratch": scratch.nothing, **more}
    return Operator(name, axes, attention_flops, is_product=True, is_attention=True, **more)


OPERATORS = (
    _attention("Attention", attention, masks=(3,), states={1: 4, 2: 5}, scratch=scratch.attention),
    _attention(
        "com.microsoft.Attention",
        fused_attention,
        masks=(3, 5),
        states={1: 4},
        crashes_without=2,
        scratch=scratch.fused_attention,
    ),
    _attention("com.microsoft.DecoderMaskedMultiHeadAttention", masks=(3, 4), states={1: 5, 2: 6}),
    _attention(
        "com.microsoft.GroupQueryAttention",
        group_query_attention,
        masks=(5, 6, 10),
        positions=(9,),
        tables=(7, 8),
        states={1: 3, 2: 4},
        state_sizes=cache_sizes,
        writes_in_place=True,
        example_input=key_lengths,
        crashes_empty=(0,),
        scratch=scratch.group_query_attention,
        half_scratch=scratch.half_group_query_attention,
        single_scratch=scratch.decomposed_attention,
    ),
    _attention(
        LATENT,
        latent_attention,
        masks=(5, 6, 10),
        states={1: 3, 2: 4},
        writes_in_place=True,
        example_input=key_lengths,
        scratch=scratch.latent_attention,
        half_scratch=scratch.latent_attention,
    ),
    _attention(
        "com.microsoft.MultiHeadAttention",
        multi_head_attention,
        masks=(4, 5),
        states={1: 6, 2: 7},
        scratch=scratch.multi_head_attention,
    ),
    _attention("com.microsoft.QAttention", fused_attention, masks=(5,), states={1: 8}, quantizes=True),
    Operator("RotaryEmbedding", rotary_embedding, positions=(3,), tables=(1, 2)),
    Operator("com.microsoft.MRotaryEmbedding", rotary_embedding, positions=(1,), tables=(2, 3)),
    Operator(
        "com.microsoft.RotaryEmbedding", rotary_embedding, positions=(1,), tables=(2, 3), example_input=first_position
    ),
)
