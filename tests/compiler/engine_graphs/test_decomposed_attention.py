"""Attention with caches in place, written as other operators for GPUs, gives what ONNX Runtime's operator gives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from splitc.compiler.engine_graphs.cpu_values import why_not_captured
from splitc.compiler.engine_graphs.gpu_sizes import decompose_for_gpus
from splitc.compiler.graphs.origins import described
from tests.conftest import Array, Arrays
from tests.helpers.needs import needs_caches

HEADS, KV_HEADS, SIZE = 4, 2, 16
WIDTH, KV_WIDTH = HEADS * SIZE, KV_HEADS * SIZE
MOST = 40


def attention(attributes: str, packed: bool = False, more: str = "", window: int = 0) -> ir.Model:
    """One attention. Its lengths come from a mask, as onnxruntime-genai's builder writes them."""
    given = (
        f"float[b, t, {WIDTH + 2 * KV_WIDTH}] q"
        if packed
        else f"float[b, t, {WIDTH}] q, float[b, t, {KV_WIDTH}] k, float[b, t, {KV_WIDTH}] v"
    )
    rows = window or "room"
    return ir.from_onnx_text(
        f"""<ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1]>
        g ({given}, float[b, {KV_HEADS}, {rows}, {SIZE}] past_k, float[b, {KV_HEADS}, {rows}, {SIZE}] past_v,
           int64[b, all] mask, float[{MOST}, half] cos, float[{MOST}, half] sin, float[n, 1, t, all] bias,
           float[{HEADS}] sinks, int64[b, t] positions)
        => (float[b, t, {WIDTH}] y, float[b, {KV_HEADS}, m, {SIZE}] k_now, float[b, {KV_HEADS}, m, {SIZE}] v_now)
        {{
            one = Constant <value = int64[1] {{1}}> ()
            counted = ReduceSum <keepdims = 0> (mask, one)
            less = Sub (counted, one)
            last = Cast <to = 6> (less)
            shape = Shape (mask)
            all = Gather (shape, one)
            total = Cast <to = 6> (all)
            y, k_now, v_now = com.microsoft.GroupQueryAttention
                <num_heads = {HEADS}, kv_num_heads = {KV_HEADS}, {attributes}>
                (q, {", " if packed else "k, v"}, past_k, past_v, last, total{more})
        }}"""
    )


def request(
    rows: Sequence[int], new: int, before: int, room: int, packed: bool = False, turned: int = SIZE // 2
) -> Arrays:
    """A request for as many rows as `rows`, each with so many of its own tokens to see."""
    random, batch, after = np.random.default_rng(0), len(rows), before + new

    def normal(*shape: int) -> Array:
        return np.asarray(random.standard_normal(shape), np.float32)

    widths = {"q": WIDTH + 2 * KV_WIDTH} if packed else {"q": WIDTH, "k": KV_WIDTH, "v": KV_WIDTH}
    feeds = {name: normal(batch, new, width) for name, width in widths.items()}
    feeds |= {f"past_{name}": normal(batch, KV_HEADS, room, SIZE) for name in "kv"}
    mask = np.asarray(np.arange(after)[None] < np.array(rows)[:, None], np.int64)
    positions = np.arange(before, after)[None].repeat(batch, 0) + 1
    tables = {"cos": normal(MOST, turned), "sin": normal(MOST, turned)}
    return {
        **feeds,
        **tables,
        "mask": mask,
        "bias": normal(batch, 1, new, after),
        "sinks": normal(HEADS),
        "positions": positions,
    }


def outputs(model: ir.Model, feeds: Arrays) -> list[Array]:
    session = ort.InferenceSession(onnx.ModelProto.SerializeToString(ir.to_proto(model)))
    return session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})  # type: ignore[no-any-return]


def decomposed(model: ir.Model) -> ir.Model:
    """The model as engines for GPUs have it: replayable, without the operator."""
    decompose_for_gpus(model.graph, {})
    assert not any(node.op_type == "GroupQueryAttention" for node in model.graph)
    assert why_not_captured(model.graph) == ""
    return model


ROTARY = ", cos, sin"


@needs_caches
@pytest.mark.parametrize(
    ("attributes", "packed", "more"),
    [
        ("do_rotary = 1", True, ROTARY),
        ("do_rotary = 1, rotary_interleaved = 1, scale = 0.4", False, ROTARY),
        ("do_rotary = 1, local_window_size = 4, softcap = 3.0", True, ROTARY),
        ("do_rotary = 1", False, f"{ROTARY}, positions, bias"),
        ("causal = 0", False, ", , , , bias"),
        ("causal = 1", False, ", , , , bias, sinks"),
    ],
)
@pytest.mark.parametrize(
    ("rows", "new", "before", "room"),
    [([7], 7, 0, 0), ([7], 7, 0, 16), ([9], 1, 8, 8), ([9], 1, 8, 16), ([12], 4, 8, 16), ([9, 9], 1, 8, 12)],
)
def test_results_are_those_of_the_operator(
    attributes: str, packed: bool, more: str, rows: list[int], new: int, before: int, room: int
) -> None:
    feeds = request(rows, new, before, room, packed)
    expected = outputs(attention(attributes, packed, more), feeds)
    actual = outputs(decomposed(attention(attributes, packed, more)), feeds)
    after = before + new
    for ours, theirs in zip(actual, expected, strict=True):
        ours, theirs = (array if array.ndim == 3 else array[:, :, :after] for array in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert actual[1].shape[2] == max(room, after)


@pytest.mark.parametrize(("rows", "new", "before"), [([5, 7], 7, 0), ([9, 6], 1, 8)])
@pytest.mark.parametrize("room", [0, 16])
def test_rows_of_a_batch_have_lengths_of_their_own(rows: list[int], new: int, before: int, room: int) -> None:
    """A prompt is padded behind its tokens; what follows is written behind these."""
    feeds = request(rows, new, before, max(room, before))
    expected, actual = (
        outputs(make(attention("do_rotary = 1", more=ROTARY)), feeds) for make in (lambda model: model, decomposed)
    )
    for row, filled in enumerate(rows):
        tokens = min(new, filled)
        np.testing.assert_allclose(actual[0][row, :tokens], expected[0][row, :tokens], rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(actual[1:], expected[1:], strict=True):
            np.testing.assert_allclose(ours[row, :, :filled], theirs[row, :, :filled], rtol=1e-5, atol=1e-6)


def test_sizes_may_be_symbols_that_are_numbers() -> None:
    """As transformers' exporter names fixed sizes."""
    model = attention("causal = 1")
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.shape is not None:
            value.shape = ir.Shape([str(size) for size in value.shape])
    decomposed(model)


WINDOW = 6


@needs_caches
@pytest.mark.parametrize(("new", "before"), [(4, 0), (9, 0), (1, 4), (1, 6), (1, 20), (3, 5), (9, 8)])
@pytest.mark.parametrize("packed", [False, True])
def test_caches_that_hold_a_window_evict_rows(new: int, before: int, packed: bool) -> None:
    kept = f"do_rotary = 1, local_window_size = {WINDOW}, sliding_window_cache = 1"
    feeds = request([before + new], new, before, WINDOW, packed)
    expected = outputs(attention(kept, packed, ROTARY, WINDOW), feeds)
    actual = outputs(decomposed(attention(kept, packed, ROTARY, WINDOW)), feeds)
    filled = min(WINDOW, before + new)
    assert not actual[1][:, :, filled:].any()  # the operator leaves them as its memory was
    for ours, theirs in zip(actual, expected, strict=True):
        ours, theirs = (array if array.ndim == 3 else array[:, :, :filled] for array in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@needs_caches
def test_caches_that_hold_a_window_differ_in_length_in_a_batch() -> None:
    kept = f"local_window_size = {WINDOW}, sliding_window_cache = 1"
    feeds = request([9, 5], 1, 8, WINDOW)
    expected, actual = (
        outputs(make(attention(kept, window=WINDOW)), feeds) for make in (lambda model: model, decomposed)
    )
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(actual[1:], expected[1:], strict=True):
        for row, filled in ((0, WINDOW), (1, 5)):
            np.testing.assert_allclose(ours[row, :, :filled], theirs[row, :, :filled], rtol=1e-5, atol=1e-6)


@needs_caches
def test_sinks_beside_a_mask_are_decomposed_in_half_precision_too() -> None:
    """Kernels that know sinks take no mask."""
    model, feeds = attention("causal = 1", more=", , , , bias, sinks"), request([9], 1, 8, 16)
    halves = ir.from_onnx_text(ir.to_onnx_text(model).replace("float[", "float16["))
    small = {name: array.astype(np.float16) if array.dtype == np.float32 else array for name, array in feeds.items()}
    for ours, theirs in zip(outputs(decomposed(halves), small), outputs(model, feeds), strict=True):
        assert ours.dtype == np.float16
        ours, theirs = (array if array.ndim == 3 else array[:, :, :9] for array in (ours, theirs))
        np.testing.assert_allclose(ours.astype(np.float32), theirs, rtol=1e-2, atol=5e-3)
    whole = ir.from_onnx_text(ir.to_onnx_text(attention("causal = 1")).replace("float[", "float16["))
    decompose_for_gpus(whole.graph, {})
    assert any(node.op_type == "GroupQueryAttention" for node in whole.graph)


@needs_caches
def test_nodes_of_branches_have_kernels_for_bfloat16() -> None:
    """ONNX Runtime did not load the Pad of caches that are too short: its provider for GPUs pads no bfloat16."""
    text = ir.to_onnx_text(attention("causal = 1", more=", , , , bias, sinks")).replace("float[", "bfloat16[")
    graph = decomposed(ir.from_onnx_text(text)).graph
    pads = [node for node in graph.all_nodes() if node.op_type == "Pad"]
    assert pads
    assert {described(node.inputs[0]).dtype for node in pads if node.inputs[0]} == {ir.DataType.FLOAT}
    assert {described(node.outputs[0]).dtype for node in pads} == {ir.DataType.FLOAT}
