"""Attention as one operator is sharded by heads: queries, keys, values and output projection, with one sum."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from splitc.compiler.analysis.costs import node_flops
from splitc.compiler.lowering.rank_graph import rank_graph
from splitc.compiler.request.shapes import Shape
from tests.helpers.attention import (
    HEAD,
    HEADS,
    HIDDEN,
    PROJECTIONS,
    WIDTH,
    attend,
    finish,
    normed,
    project,
    project_back,
)
from tests.helpers.blocks import MORE_THAN_HEADS, Block, check_split, sharded
from tests.helpers.operators import Tiny, check_operator, having, number, softmax, stored


def attention_operator(flat: bool) -> Block:
    """ONNX's Attention (opset 23) with grouped queries, a mask and a cache, and heads as an axis or flat."""
    b = Block(opset=23)
    x = normed(b)
    pasts = [b.data(f"past_{n}", (2, 4, 3, HEAD), ["n", 4, "p", HEAD]) for n in "kv"]
    mask = b.data("mask", (5, 8), ["t", "s"])
    if flat:
        q, k, v = (b.op("MatMul", x, b.w(n, HIDDEN, count * HEAD)) for n, count in (("q", HEADS), ("k", 4), ("v", 4)))
        heads = {"q_num_heads": HEADS, "kv_num_heads": 4}
    else:
        q, k, v = project(b, x, "q"), project(b, x, "k", 4), project(b, x, "v", 4)
        heads = {}
    out, *presents = b.ops("Attention", q, k, v, mask, *pasts, outputs=3, softcap=2.0, **heads)
    if flat:
        project_back(b, out)
    else:
        finish(b, out)
    for present, name in zip(presents, "kv"):
        b.give(present, f"present_{name}", ["n", 4, "s", HEAD])
    return b


def with_normed_heads() -> Block:
    """Norms over all heads of queries, and over all heads of keys, of which there are fewer than ranks."""
    b = Block(opset=23)
    x = normed(b)
    q, k, v = (b.op("MatMul", x, b.w(n, HIDDEN, count * HEAD)) for n, count in (("q", HEADS), ("k", 2), ("v", 2)))
    q, k = (
        b.op("RMSNormalization", value, b.w(f"{n} scale", size * HEAD))
        for n, value, size in (("q", q, HEADS), ("k", k, 2))
    )
    project_back(b, b.op("Attention", q, k, v, q_num_heads=HEADS, kv_num_heads=2))
    return b


def group_query_attention(packed: bool, scores: bool = False) -> Block:
    """A batch of 1: the kernel on CPUs takes no larger one with a past."""
    b, kv_heads, head = Block(), 4, 16
    x = b.op("Softmax", b.data("x", (1, 5, HIDDEN), ["n", "t", HIDDEN]))
    widths = {"q": HEADS * head, "k": kv_heads * head, "v": kv_heads * head}
    if packed:
        inputs: list[Any] = [b.op("MatMul", x, b.w("qkv", HIDDEN, sum(widths.values()))), None, None]
    else:
        inputs = [b.op("MatMul", x, b.w(name, HIDDEN, width)) for name, width in widths.items()]
    pasts = [b.data(f"past_{n}", (1, kv_heads, 3, head), ["n", kv_heads, "p", head]) for n in "kv"]
    lengths = b.constant([7], np.int32), b.constant(8, np.int32)
    tables = [b.weight(n, ir.tensor(b.random(n, 16, head // 2))) for n in ("cos", "sin")]
    heads = {"num_heads": HEADS, "kv_num_heads": kv_heads}
    kind = "com.microsoft.GroupQueryAttention"
    if scores:
        heads["qk_output"] = 1
    out, *presents = b.ops(kind, *inputs, *pasts, *lengths, *tables, outputs=3 + scores, do_rotary=1, **heads)
    project_back(b, out, HEADS * head)
    if scores:
        b.give(presents.pop(), "scores", ["n", HEADS, "t", "s"])
    for present, name in zip(presents, "kv"):
        b.give(present, f"present_{name}", ["n", kv_heads, "s", head])
    return b


def multi_head_attention(form: str) -> Block:
    b = Block()
    x = normed(b)
    q, k, v = (b.op("MatMul", x, b.w(name, HIDDEN, WIDTH)) for name in "qkv")
    if form == "heads":
        k, v = (
            b.op("Transpose", b.op("Reshape", value, b.ints(0, 0, HEADS, HEAD)), perm=[0, 2, 1, 3]) for value in (k, v)
        )
    bias = [b.w("bias", 3 * WIDTH)] if form == "bias" else [None]
    mask = b.data("mask", (1, 1, 5, 5), [1, 1, "t", "t"])
    project_back(b, b.op("com.microsoft.MultiHeadAttention", q, k, v, *bias, None, mask, num_heads=HEADS))
    return b


def attention_with_the_projection_inside() -> Block:
    b = Block()
    x = normed(b)
    past = b.data("past", (2, 2, HEADS, 3, HEAD), [2, "n", HEADS, "p", HEAD])
    mask = b.constant(np.ones((2, 8)), np.int32)
    weights = b.w("qkv", HIDDEN, 3 * WIDTH), b.w("bias", 3 * WIDTH)
    out, present = b.ops("com.microsoft.Attention", x, *weights, mask, past, outputs=2, num_heads=HEADS)
    project_back(b, out)
    b.give(present, "present", [2, "n", HEADS, "s", HEAD])
    return b


def masked_attention_of_a_token() -> Block:
    """DecoderMaskedMultiHeadAttention has no axes rule: its projections stay whole."""
    b = Block()
    x = softmax(b, b.data("x", (2, 1, HIDDEN), ["n", 1, HIDDEN]))
    pasts = [b.data(f"past_{n}", (2, HEADS, 8, HEAD)) for n in "kv"]
    q, k, v = (b.op("MatMul", x, b.w(name, HIDDEN, WIDTH)) for name in "qkv")
    length = b.constant([4], np.int32)
    kind, how = "com.microsoft.DecoderMaskedMultiHeadAttention", {"num_heads": HEADS, "past_present_share_buffer": 1}
    out = b.ops(kind, q, k, v, None, None, *pasts, length, outputs=3, **how)[0]
    feed_forward(b, b.op("MatMul", out, b.w("o", WIDTH, HIDDEN)))
    return b


def quantized_attention() -> Block:
    """What it multiplies is quantized with a scale for all, before."""
    b = Block()
    scale, zero = number(b, 0.01), b.constant(128, np.uint8)
    x = b.op("QuantizeLinear", normed(b), scale, zero)
    weights = stored(b, "qkv", HIDDEN, 3 * WIDTH), b.w("bias", 3 * WIDTH), scale, number(b, 0.01)
    mask = b.constant(np.ones((2, 5)), np.int32)
    out = b.op("com.microsoft.QAttention", x, *weights, mask, zero, b.constant(0, np.int8), num_heads=HEADS)
    feed_forward(b, b.op("MatMul", out, b.w("o", WIDTH, HIDDEN)))
    return b


def feed_forward(b: Block, x: ir.Value) -> None:
    """A feed-forward part, which is split."""
    inner = b.op("Relu", b.op("MatMul", softmax(b, x), b.w("A", HIDDEN, WIDTH)))
    b.give(softmax(b, b.op("MatMul", inner, b.w("B", WIDTH, HIDDEN))))


def rotary(kind: str, flat: bool) -> Block:
    b = Block(opset=23)
    x = normed(b)
    tables = [b.weight(n, ir.tensor(b.random(n, 16, HEAD // 2))) for n in ("cos", "sin")]
    rows, symbols = np.tile(np.arange(5), (2, 1)), ["n", "t"]
    has_sections = kind.endswith(".MRotaryEmbedding")
    if has_sections:
        positions = b.indices("positions", np.stack([rows, rows // 2, 0 * rows]), [3, *symbols])
    else:
        positions = b.indices("positions", rows, symbols)
    sections = {"mrope_section": [1, 1, 0]} if has_sections else {}
    extra = [positions, *tables] if "." in kind else [*tables, positions]

    def turned(name: str) -> ir.Value:
        if not flat:
            return b.op(kind, project(b, x, name), *extra, **sections)
        heads = {} if kind == "com.microsoft.RotaryEmbedding" else {"num_heads": HEADS}
        wide = b.op(kind, b.op("MatMul", x, b.w(name, HIDDEN, WIDTH)), *extra, **heads, **sections)
        return b.op("Transpose", b.op("Reshape", wide, b.ints(0, 0, HEADS, HEAD)), perm=[0, 2, 1, 3])

    finish(b, attend(b, turned("q"), turned("k"), project(b, x, "v")))
    return b


def rotated_heads() -> Block:
    """Heads are the batch, each with its own tables; there are no positions."""
    b = Block(opset=23)
    x = softmax(b, b.data("x", (5, HIDDEN)))
    tables = [b.w(name, HEADS, 5, HEAD // 2) for name in ("cos", "sin")]

    def projected(name: str) -> ir.Value:
        return b.op("Transpose", b.op("Reshape", b.op("MatMul", x, b.w(name, HIDDEN, WIDTH)), b.ints(5, HEADS, HEAD)))

    def turned(name: str) -> ir.Value:
        by_head = b.op("Transpose", projected(name), perm=[1, 2, 0])
        return b.op("RotaryEmbedding", by_head, *tables, num_heads=1)

    scores = softmax(b, b.op("MatMul", turned("q"), b.op("Transpose", turned("k"), perm=[0, 2, 1])))
    mixed = b.op("MatMul", scores, b.op("Transpose", projected("v"), perm=[1, 2, 0]))
    flat = b.op("Reshape", b.op("Transpose", mixed, perm=[1, 0, 2]), b.ints(5, WIDTH))
    b.give(softmax(b, b.op("MatMul", flat, b.w("o", WIDTH, HIDDEN))), shape=[5, HIDDEN])
    return b


def by_heads(build: Callable[[], Block], split: Collection[str] = PROJECTIONS) -> Tiny:
    return Tiny(build, split, sums=1, shares=MORE_THAN_HEADS)


GRAPHS: dict[str, Tiny] = {
    "Attention": by_heads(lambda: attention_operator(False)),
    "com.microsoft.Attention": by_heads(attention_with_the_projection_inside, {"qkv", "bias", "o"}),
    "com.microsoft.DecoderMaskedMultiHeadAttention": Tiny(masked_attention_of_a_token, "AB", PROJECTIONS),
    "com.microsoft.GroupQueryAttention": by_heads(lambda: group_query_attention(False)),
    "com.microsoft.MultiHeadAttention": by_heads(lambda: multi_head_attention("apart")),
    "com.microsoft.QAttention": Tiny(
        quantized_attention, {"A", "B", "qkv", "bias", "o"}, sums=2, shares=MORE_THAN_HEADS
    ),
    "RotaryEmbedding": by_heads(lambda: rotary("RotaryEmbedding", False)),
    "com.microsoft.MRotaryEmbedding": by_heads(lambda: rotary("com.microsoft.MRotaryEmbedding", False)),
    "com.microsoft.RotaryEmbedding": by_heads(lambda: rotary("com.microsoft.RotaryEmbedding", False)),
}
# tests/compiler/caches/test_latent.py splits it, decomposed.
WITHOUT_KERNEL = {"splitc.compiler.LatentAttention"}
FORMS: dict[str, Tiny] = {
    "Attention, flat": by_heads(lambda: attention_operator(True)),
    "Attention, normed heads": Tiny(with_normed_heads, {*PROJECTIONS, "q scale", "k scale"}, shares=MORE_THAN_HEADS),
    "GroupQueryAttention, packed": by_heads(lambda: group_query_attention(True), {"qkv", "o"}),
    "GroupQueryAttention, scores": by_heads(lambda: group_query_attention(False, scores=True)),
    "RotaryEmbedding, tables of the batch": by_heads(rotated_heads, {*PROJECTIONS, "cos", "sin"}),
    "MultiHeadAttention, bias": by_heads(lambda: multi_head_attention("bias")),
    "MultiHeadAttention, heads": by_heads(lambda: multi_head_attention("heads")),
    "RotaryEmbedding, flat": by_heads(lambda: rotary("RotaryEmbedding", True)),
    "com.microsoft.MRotaryEmbedding, flat": by_heads(lambda: rotary("com.microsoft.MRotaryEmbedding", True)),
    "com.microsoft.RotaryEmbedding, flat": by_heads(lambda: rotary("com.microsoft.RotaryEmbedding", True)),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_operator_is_sharded(name: str, tmp_path: Path) -> None:
    check_operator(GRAPHS, name, tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_other_form_is_sharded(form: str, tmp_path: Path) -> None:
    FORMS[form].check(tmp_path)


def test_one_head_stays_whole(tmp_path: Path) -> None:
    """Values have the width of queries where no attribute gives another, so a rank can't have a part of it."""
    b = Block()
    weights = b.w("qkv", HIDDEN, 3 * WIDTH), b.w("bias", 3 * WIDTH)
    project_back(b, b.op("com.microsoft.Attention", normed(b), *weights, num_heads=1))
    for plan in check_split(b, tmp_path, (), whole={"qkv", "bias"}):
        assert not any("did not hold" in warning for warning in plan.warnings), plan.warnings


def test_norms_of_queries_and_of_keys_wait_for_one_sum(tmp_path: Path) -> None:
    for plan in check_split(with_normed_heads(), tmp_path, {*PROJECTIONS, "q scale", "k scale"}, sums=1):
        split = sharded(plan)
        assert len(split.sums.reduced) == 2 and split.sums.count == plan.split.collectives == 2
        graph = rank_graph(split, plan.ranks[0].stage, 0)
        assert [node.op_type for node in graph].count("DistCollective") == 2


@pytest.mark.parametrize(
    "name", [name for name in GRAPHS if name in having("flops") and name != "com.microsoft.Attention"]
)
def test_flops(name: str) -> None:
    """Queries times keys, and scores times values, over new and cached tokens."""
    domain, _, kind = name.rpartition(".")
    values = [ir.Value(name=part) for part in ("q", "k", "v", "past")]
    node = ir.node(kind, values, domain=domain, num_outputs=2)
    node.outputs[0].name, node.outputs[1].name = "y", "present"
    new, size = 5, HEADS * HEAD
    shapes = dict.fromkeys("qkvy", (2, new, size)) | {"past": (2, HEADS, 3, HEAD), "present": (2, HEADS, 8, HEAD)}
    assert node_flops(node, shapes) == 2 * (2 * 2 * new * 8 * size)


@pytest.mark.parametrize(
    ("query", "key", "keys"),
    [
        ((2, 5, 12), (2, 3, 12), 3),
        ((2, 5, 12), (2, 4, 3, 3), 3),
        ((2, 5, 12), (2, 3, 4, 2, 3), 3),
        ((2, 5, 4, 3, 3), None, 5),
    ],
)
def test_flops_of_cross_attention(query: Shape, key: Shape | None, keys: int) -> None:
    """The number of keys is that of the keys that are given, in any form, not that of the queries."""
    names = ("q",) if key is None else ("q", "k")
    node = ir.node("MultiHeadAttention", [ir.Value(name=name) for name in names], domain="com.microsoft", num_outputs=1)
    node.outputs[0].name = "y"
    shapes = {"q": query, "y": (2, 5, 12)} | ({} if key is None else {"k": key})
    assert node_flops(node, shapes) == 4 * 2 * 5 * 12 * keys
