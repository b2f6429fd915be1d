"""Attention with caches in place has a branch for several rows, which gives what the operator gives for each row."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from splitc.compiler.caches.lengths import BRANCH_NODES, SEVERAL_ROWS
from splitc.compiler.engine_graphs.several_rows import take_several_rows
from tests.conftest import Array, Arrays
from tests.helpers.needs import needs_caches

HEADS, KV_HEADS, SIZE = 4, 2, 8


def attention(attributes: str, more: str) -> ir.Model:
    """One attention with its caches, whose length is an input of its own."""
    return ir.from_onnx_text(
        f"""<ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1]>
        g (float[b, t, {HEADS * SIZE}] q, float[b, t, {KV_HEADS * SIZE}] k, float[b, t, {KV_HEADS * SIZE}] v,
           float[b, {KV_HEADS}, room, {SIZE}] past_k, float[b, {KV_HEADS}, room, {SIZE}] past_v, int32[b] last,
           int32[1] total, float[n, 1, t, all] bias, float[{HEADS}] sinks, bool[rows, asked] length)
        => (float[b, t, {HEADS * SIZE}] y, float[b, {KV_HEADS}, m, {SIZE}] k_now, float[b, {KV_HEADS}, m, {SIZE}] v_now)
        {{ y, k_now, v_now = com.microsoft.GroupQueryAttention
            <num_heads = {HEADS}, kv_num_heads = {KV_HEADS}, scale = 0.4, {attributes}>
            (q, k, v, past_k, past_v, last, total{more}) }}"""
    )


def request(rows: int, new: int, before: int, room: int) -> Arrays:
    random, after = np.random.default_rng(0), before + new

    def normal(*shape: int) -> Array:
        return np.asarray(random.standard_normal(shape), np.float32)

    feeds = {"q": normal(rows, new, HEADS * SIZE), "bias": normal(rows, 1, new, after), "sinks": normal(HEADS)}
    for name in "kv":
        feeds |= {name: normal(rows, new, KV_HEADS * SIZE), f"past_{name}": normal(rows, KV_HEADS, room, SIZE)}
    return {**feeds, "last": np.full(rows, after - 1, np.int32), "total": np.array([after], np.int32)}


@needs_caches
@pytest.mark.parametrize(
    ("attributes", "more"),
    [
        ("causal = 0", ""),
        ("causal = 1", ""),
        ("causal = 0", ", , , , bias"),
        ("causal = 1, softcap = 2.0", ", , , , bias"),
        ("causal = 0", ", , , , bias, sinks"),
    ],
)
@pytest.mark.parametrize("room", [5, 12])
def test_branch_gives_each_rows_results(attributes: str, more: str, room: int) -> None:
    model = attention(attributes, more)
    model.graph[0].metadata_props[SEVERAL_ROWS] = "length"
    take_several_rows(model.graph)
    assert sum(1 for _ in model.graph.all_nodes()) <= BRANCH_NODES + 15
    session = ort.InferenceSession(onnx.ModelProto.SerializeToString(ir.to_proto(model)))
    names, taken = [value.name for value in session.get_outputs()], {value.name for value in session.get_inputs()}

    def run(feeds: Arrays, by_branch: bool) -> list[Array]:
        feeds = {**feeds, "length": np.zeros((5, int(by_branch)), bool)}
        return list(session.run(names, {name: array for name, array in feeds.items() if name in taken}))

    feeds = request(3, 4, 5, room)
    with pytest.raises(Exception, match="batch_size must be 1"):
        run(feeds, by_branch=False)
    made = run(feeds, by_branch=True)
    assert made[1].shape[2] == max(room, 9)
    for row in range(3):
        one = {name: array[row : row + 1] if len(array) == 3 else array for name, array in feeds.items()}
        for whole, expected in zip(made, run(one, by_branch=False), strict=True):
            filled = (slice(0, 1), slice(None), slice(0, 9))  # what lies in the room behind means nothing
            np.testing.assert_allclose(whole[row : row + 1][filled], expected[filled], atol=1e-6)
