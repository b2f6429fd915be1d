"""On GPUs, values that grow with each token are computed before the ranks, whose fixed sizes let tokens be replayed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.caches.masks import find_masks
from splitc.compiler.patterns.sizes import Axis
from splitc.runtime import Session
from splitc.runtime.engines.onnxruntime_cpu import OnnxRuntimeBackend
from splitc.runtime.errors import FeedError
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.package.states import Length, Preamble
from splitc.runtime.requests import preamble
from splitc.runtime.requests.preamble import is_causal
from tests.compiler.caches.test_caches import OPTIMUM
from tests.compiler.caches.test_caches import STYLES as CACHED
from tests.conftest import assert_close, run_whole
from tests.helpers.needs import needs_caches
from tests.helpers.written_attention import operators
from tests.helpers.written_decoder import Style, feeds, following, without_states, write

pytestmark = needs_caches
HALF = TensorProto.FLOAT16
# Masks do not depend on numbers of heads, nor on the form in which an operator takes the past.
STYLES = {name: style for name, style in CACHED.items() if "head" not in name and not name.endswith("with the past")}
# One with a table of tokens that is no small constant.
STYLES = {
    **STYLES,
    "sizes of hidden states": replace(OPTIMUM, reads="hidden", vocabulary=2000),
    "GroupQueryAttention": replace(OPTIMUM, operator="fused grouped"),
    "zeroed rows": replace(OPTIMUM, masked=False, zeroed=True),
}
# Results in halves.
CLOSE = 2e-2


# Packages that several tests use.
_made: dict[object, Path] = {}


def compiled(style: Style, folder: Path, mode: str, devices: list[str]) -> Path:
    """A package of the style's model, which is written to the folder."""
    onnx.save(write(style), folder / "model.onnx")
    key = (style, mode, *devices)
    if key not in _made:
        _made[key] = _compile(style, folder, mode, devices)
    return _made[key]


def _compile(style: Style, folder: Path, mode: str, devices: list[str]) -> Path:
    plan = plan_model(folder / "model.onnx", devices, Request(split_mode=mode, spread=True))
    assert [outcome.operator for outcome in plan.analysis.outcomes if outcome.kind == "cache"] == [
        "GroupQueryAttention"
    ] * style.layers, plan.analysis.outcomes
    assert plan.analysis.preamble is not None
    assert [outcome.operator for outcome in plan.analysis.outcomes if outcome.kind == "preamble"] == ["preamble"]
    # A fake GPU runs engines on ones to learn the outputs' sizes, of which these do not take any.
    compile_model(plan, folder / "package", verify="cuda0" not in devices)
    return folder / "package"


@pytest.mark.parametrize(("name", "mode"), [*((name, "tensor") for name in STYLES), ("optimum", "layer")])
def test_packages_for_gpus_give_what_the_model_gives(tmp_path: Path, name: str, mode: str) -> None:
    """If the caller feeds the pasts, and in sequences with and without room."""
    style = replace(STYLES[name], dtype=HALF)
    path = compiled(style, tmp_path, mode, ["cuda0", "cuda1"])
    with Session(path, devices=["cpu0", "cpu1"]) as session:
        assert [tensor.name for tensor in session.inputs] == [*feeds(style, 1, 1, 1)]
        for number, (batch, new, past, padded) in enumerate([(2, 1, 9, 4), (3, 7, 0, 2), (1, 3, 8, 2)]):
            request = feeds(style, batch, 1 if style.one else new, past, padded, number)
            assert_close(session.run(request), run_whole(tmp_path / "model.onnx", request), CLOSE)
        for batch, steps, capacity in ((1, (5, 1, 3), 24), (3, (6, 1, 1), 24), (2, (4, 1), None)):
            with session.start(capacity) as sequence:
                request = feeds(style, batch, 1 if style.one else steps[0], 0, padded=2)
                for new in (*steps[1:], 1):
                    expected = run_whole(tmp_path / "model.onnx", request)
                    actual = sequence.run(without_states(request))
                    assert_close(actual, {"logits": expected["logits"]}, CLOSE)
                    request = following(style, expected, batch, 1 if style.one else new, padded=2)


@pytest.mark.parametrize("name", ["optimum", "sizes of hidden states"])
def test_engines_see_no_size_that_grows(tmp_path: Path, name: str) -> None:
    """With room, each token has the same shapes, and nothing prevents capture as a CUDA graph."""
    style = replace(STYLES[name], dtype=HALF)
    path = compiled(style, tmp_path, "layer", ["cuda0"])
    manifest = read_manifest(path)
    assert manifest.preamble is not None and "attention_mask" in manifest.preamble.consumed
    names = {value.name for value in ir.load(path / manifest.ranks[0].engines[0].path).graph.inputs}
    assert names.isdisjoint({"attention_mask", "splitc.past"}) and names >= set(manifest.preamble.outputs)
    made = {name.rpartition("/")[2] for name in manifest.preamble.outputs}
    assert made == {"bias_room", "lasts"}, "all layers have one mask"
    shapes = []
    with Session(path, devices=["cpu0"]) as session, session.start(24) as sequence:
        submit = session._admission.submit

        def watched(request, here):  # type: ignore[no-untyped-def]
            taken = {name: request.feeds[name].shape for name in manifest.ranks[0].inputs if name in request.feeds}
            shapes.append(taken)
            return submit(request, here)

        session._admission.submit = watched  # type: ignore[method-assign]
        request = feeds(style, 1, 4, 0)
        for _ in range(4):
            expected = run_whole(tmp_path / "model.onnx", request)
            sequence.run(without_states(request))
            request = following(style, expected, 1, 1)
    assert all(before == after for before, after in pairwise(shapes[1:]))
    assert any(24 in shape for shape in shapes[1].values())


def test_mask_that_rows_are_multiplied_by_is_cut(tmp_path: Path) -> None:
    """Its length grows, though that of an empty cache and new tokens does not show it."""
    path = compiled(STYLES["zeroed rows"], tmp_path, "tensor", ["cuda0", "cuda1"])
    for rank in read_manifest(path).ranks:
        names = {value.name for value in ir.load(path / rank.engines[0].path).graph.inputs}
        assert names.isdisjoint({"attention_mask", "splitc.past"})


@pytest.mark.parametrize(("mode", "window"), [("layer", 0), ("layer", 3), ("tensor", 0), ("tensor", 3), ("batch", 0)])
def test_masks_that_hide_later_tokens_and_those_before_a_window_are_left_out(
    tmp_path: Path, mode: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines have a form without masks, with causal attention. The form with masks is loaded at the first padding."""
    style = replace(OPTIMUM, dtype=HALF, window=window, layers=4 if window else 2)
    path = compiled(style, tmp_path, mode, ["cuda0", "cuda1"])
    manifest = read_manifest(path)
    assert manifest.masks
    windows: list[int] = []
    for rank in manifest.ranks:
        (engine,) = rank.engines
        assert manifest.masks <= {*engine.inputs} and engine.unmasked is not None
        graph = ir.load(path / engine.unmasked).graph
        assert manifest.masks.isdisjoint(value.name for value in graph.inputs)
        attentions = [node for node in graph if node.op_type == "GroupQueryAttention"]
        assert attentions and all(node.attributes.get_int("causal", 1) == 1 for node in attentions)
        windows += [node.attributes.get_int("local_window_size", 0) for node in attentions]
        assert "IsNaN" in {node.op_type for node in ir.load(path / engine.path).graph}
        assert "IsNaN" not in {node.op_type for node in graph}, "each token sees itself"
    assert windows == [window, 0] * (len(windows) // 2)
    loaded = []
    load = OnnxRuntimeBackend.load

    def watched(self: OnnxRuntimeBackend, path: Path, *how: Any) -> Any:
        loaded.append(path.name)
        return load(self, path, *how)

    monkeypatch.setattr(OnnxRuntimeBackend, "load", watched)
    assert manifest.preamble is not None and manifest.preamble.plain is not None
    assert {*manifest.preamble.windows.values()} == ({window} if window else set())
    with Session(path, devices=["cpu0", "cpu1"], ranks="threads") as session:
        with monkeypatch.context() as patch:
            patch.setattr(preamble, "is_causal", lambda *_: pytest.fail("the mask is computed"))
            for batch, new, past in ((2, 5, 0), (2, 1, 9), (1, 3, 8), (2, 1, 0)):
                request = feeds(style, batch, new, past)
                assert_close(session.run(request), run_whole(tmp_path / "model.onnx", request), CLOSE)
        assert all("unmasked" in name for name in loaded) and len(loaded) == 2
        request = feeds(style, 2, 5, 0, padded=2)
        assert_close(session.run(request), run_whole(tmp_path / "model.onnx", request), CLOSE)
        assert len(loaded) == 4


def test_blank_rows_are_left_out_with_masks(tmp_path: Path) -> None:
    """If no row is blank. They keep no transposes."""
    style = replace(STYLES["blank rows"], dtype=HALF)
    path = compiled(style, tmp_path, "layer", ["cuda0"])
    manifest = read_manifest(path)
    own = manifest.preamble
    assert own is not None and len(own.blanks) == 1 and own.plain is not None
    (engine,) = manifest.ranks[0].engines
    assert "Where" in operators(ir.load(path / engine.path).graph)
    plain = operators(ir.load(path / str(engine.unmasked)).graph)
    assert not {"Where", "IsNaN", "Transpose"} & {*plain}
    with Session(path, devices=["cpu0"]) as session:
        for hidden in (2, 0, 3):
            request = feeds(style, 2, 3, 0)
            request["attention_mask"][0, :hidden] = 0
            assert_close(session.run(request), run_whole(tmp_path / "model.onnx", request), CLOSE)


def test_each_row_has_its_own_mask(tmp_path: Path) -> None:
    """The batch of masks may have a symbol of its own: rows that run one by one had all masks, and used the first."""
    style = replace(OPTIMUM, picked=True)
    path = compiled(style, tmp_path, "layer", ["cuda0", "cuda1"])
    request = feeds(style, 2, 3, 5, padded=4)
    with Session(path, devices=["cpu0", "cpu1"]) as session:
        assert any(length.one_row for length in session.manifest.lengths)
        assert_close(session.run(request), run_whole(tmp_path / "model.onnx", request))
        one = {**request, "attention_mask": request["attention_mask"][:1]}
        both = {**request, "attention_mask": request["attention_mask"][[0, 0]]}
        assert_close(session.run(one), run_whole(tmp_path / "model.onnx", both))


def test_masks_of_another_batch_are_computed() -> None:
    """The graph may name the batch of masks otherwise than that of the caches."""
    engine = object.__new__(preamble.PreambleEngine)
    own = Preamble("file", [], [], ones=["mask"], batched=["mask"], batch={"ids": 0})
    engine._preamble, engine._lengths = own, [Length("past", [], 2, reads=("ids", 1))]
    for rows, plain in ((2, True), (1, False)):
        fed = {"ids": np.ones((2, 3)), "mask": np.ones((rows, 3)), "past": np.ones((0, 0))}
        assert engine._is_plain(fed) is plain


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 9])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("tokens", "before"), [(1, 0), (1, 6), (4, 0), (5, 3)])
def test_a_mask_is_causal_if_it_hides_later_tokens_and_no_others(
    tokens: int, before: int, dtype: type, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same holds for masks that also hide the tokens before a window."""
    monkeypatch.setattr(preamble, "BLOCK", 2)
    rows = before + tokens
    shown = np.tri(tokens, rows, before, np.bool_)
    if window is not None:
        shown &= ~np.tri(tokens, rows, before - window, np.bool_)
    behind: np.ndarray[Any, Any] = np.full((1, 1, tokens, 2), -1e4, dtype)  # room, which is not read
    for least in (-1e4, -65504.0, -np.inf):
        mask = np.concatenate([np.where(shown, -0.0, least)[None, None].astype(dtype), behind], axis=-1)
        assert is_causal(mask, before, window)
        assert is_causal(mask[..., :rows], before, window)
        for row, place in product(range(tokens), range(rows)):
            other = mask.copy()
            other[..., row, place] = least if shown[row, place] else 0
            assert not is_causal(other, before, window)
            other[..., row, place] = np.nan
            assert not is_causal(other, before, window)
    assert not is_causal(np.where(shown, 0, -10).astype(dtype)[None, None], before, window) or shown.all()


def test_only_what_attention_adds_for_all_heads_is_a_mask() -> None:
    """Any other bias is never zero, so a form without it would only take time to load."""
    graph = ir.from_onnx_text(
        """<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>
        agraph (float16[1, n, 32] query, float16[1, 4, room, 8] past, int32[1] lasts, int32[1] total,
                float16[1, 4, n, room] bias, float16[1, 1, n, room] mask, float16[1, 1, n, room] printed)
            => (float16[1, n, 32] one, float16[1, n, 32] other, float16[1, n, 32] third, float16[1, 1, n, room] out) {
            one = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 4, causal = 0>
                (query, query, query, past, past, lasts, total, , , , bias)
            other = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 4, causal = 0>
                (query, query, query, past, past, lasts, total, , , , mask)
            third = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 4, causal = 0>
                (query, query, query, past, past, lasts, total, , , , printed)
            out = Neg (printed)
        }"""
    ).graph
    rows = Axis((5, 6), ir.SymbolicDim("past"))
    filled: Any = SimpleNamespace(input=ir.Value(name="length"), past=rows)
    one, four = (Axis((number, number), number, number) for number in (1, 4))
    axes = {"past": [one, four, rows, four], "bias": [one, four, rows, rows]}
    sizes: Any = SimpleNamespace(axes=lambda value: axes.get(value.name, [one, one, rows, rows]))
    assert find_masks(graph.inputs, [filled], sizes) == {"mask": "length"}
    assert find_masks(graph.inputs, [], sizes) == {}


def test_memory_is_measured_and_processes_are_fed(tmp_path: Path) -> None:
    style = replace(OPTIMUM, dtype=HALF)
    path = compiled(style, tmp_path, "layer", ["cuda0", "cuda1"])
    request = feeds(style, 1, 1, 6)
    with Session(path, devices=["cpu0", "cpu1"], ranks="processes") as session:
        assert_close(session.run(request), run_whole(tmp_path / "model.onnx", request), CLOSE)


def test_several_tokens_after_others_are_run_row_by_row(tmp_path: Path) -> None:
    style = replace(OPTIMUM, dtype=HALF)
    path = compiled(style, tmp_path, "layer", ["cuda0"])
    with Session(path, devices=["cpu0"]) as session:
        request = feeds(style, 2, 3, 6)
        with pytest.raises(FeedError, match=r"3 tokens after 6 cached ones in 2 rows.* --no-fuse"):
            session.submit(request)
        assert_close(session.run(request), run_whole(tmp_path / "model.onnx", request), CLOSE)
