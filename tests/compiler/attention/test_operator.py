"""ONNX's Attention becomes a faster operator with the same numbers, or stays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from splitc.compiler.analysis.facts import analyze
from splitc.compiler.fusion.fuse import Fused, Outcome, fuse
from splitc.compiler.patterns.kernels import Gains
from splitc.compiler.request.shapes import AskedShapes
from tests.conftest import run_whole
from tests.helpers.needs import needs_later_operators
from tests.helpers.written_attention import operators

BATCH, LENGTH, ALL, HEADS, SIZE = 2, 5, 7, 4, 8
FLOATS = frozenset({ir.DataType.FLOAT})
BY_HEADS = """
    q4 = Transpose <perm = [0, 2, 1, 3]> (qr)
    k4 = Transpose <perm = [0, 2, 1, 3]> (kr)
    v4 = Transpose <perm = [0, 2, 1, 3]> (vr)
    a = Attention <{how}> (q4, k4, v4{mask})
    turned = Transpose <perm = [0, 2, 1, 3]> (a)
    flat = Constant <value = int64[3] {{0, 0, 32}}> ()
    y = Reshape (turned, flat)"""
FLAT = "y = Attention <q_num_heads = 4, kv_num_heads = {kv}, {how}> (q, k, v{mask})"


def written(
    how: str = "scale = 0.3", mask: bool = False, flat: bool = False, alike: bool = False, kv: int = HEADS
) -> str:
    """A model of one attention. If `alike`, it has as many keys as queries."""
    body = (FLAT if flat else BY_HEADS).format(how=how, mask=", m" if mask else "", kv=kv)
    split = (
        ""
        if flat
        else f"""
        heads = Constant <value = int64[4] {{0, 0, 4, 8}}> ()
        of_keys = Constant <value = int64[4] {{0, 0, {kv}, 8}}> ()
        qr = Reshape (q, heads)
        kr = Reshape (k, of_keys)
        vr = Reshape (v, of_keys)"""
    )
    rows = "l" if alike else "a"
    inputs = f"float[b, l, 32] q, float[b, {rows}, {8 * kv}] k, float[b, {rows}, {8 * kv}] v"
    inputs += f", bool[b, 1, l, {rows}] m" if mask else ""
    return f'<ir_version: 10, opset_import: ["" : 23]> attend ({inputs}) => (float[b, l, 32] y) {{ {split} {body} }}'


def feeds(text: str) -> dict[str, np.ndarray]:
    """Random feeds. The mask hides all keys from the first query, and the first keys from the others."""
    random, made = np.random.default_rng(0), dict[str, np.ndarray]()
    sizes = {"b": BATCH, "l": LENGTH, "a": ALL}
    for value in onnx.parser.parse_model(text).graph.input:
        shape = [sizes.get(d.dim_param, d.dim_value) for d in value.type.tensor_type.shape.dim]
        made[value.name] = random.standard_normal(shape).astype(np.float32)
        if value.name == "m":
            made["m"] = made["m"] > 0
            made["m"][..., 0, :], made["m"][..., 1:, -1] = False, True
    return made


def fused(text: str, folder: Path, gains: Gains = Gains(FLOATS)) -> Fused:
    onnx.save(onnx.parser.parse_model(text), folder / "model.onnx")
    analysis = analyze(
        folder / "model.onnx", AskedShapes({name: array.shape for name, array in feeds(text).items()}), 1
    )
    return fuse(analysis.graph, analysis.shapes, analysis.costs.bound, gains)


TRUE = (
    written(mask=True)
    .replace("bool[b, 1, l, a] m", "float[b, 1, l, a] like")
    .replace(
        "a = Attention",
        "true = Constant <value = bool[1, 1, 1, 1] {1}> () shape = Shape (like) m = Expand (true, shape) a = Attention",
    )
)
FORMS = {
    "plain": written(),
    "its own scale": written("is_causal = 0"),
    "mask": written(mask=True),
    "a mask that hides nothing": TRUE,
    "three axes": written(flat=True),
    "three axes, mask": written(flat=True, mask=True),
    "later tokens hidden": written("is_causal = 1", alike=True),
    "three axes, later tokens hidden": written("is_causal = 1", alike=True, flat=True),
}


@needs_later_operators
@pytest.mark.parametrize("form", FORMS)
def test_operator_becomes_multi_head_attention(tmp_path: Path, form: str) -> None:
    made = fused(FORMS[form], tmp_path)
    assert made.outcomes == (Outcome(made.outcomes[0].place, "MultiHeadAttention"),)
    names = operators(made.graph.graph)
    assert "Attention" not in names and "Transpose" not in names
    onnx.save(ir.to_proto(made.graph.model), tmp_path / "fused.onnx")
    request = feeds(FORMS[form])
    expected = run_whole(tmp_path / "model.onnx", request)["y"]
    np.testing.assert_allclose(run_whole(tmp_path / "fused.onnx", request)["y"], expected, rtol=0, atol=2e-6)


STAYS = {
    "shared keys": written(kv=2),
    "shared keys, three axes": written(kv=2, flat=True),
    "capped": written("softcap = 2.0"),
    "another precision": written("softmax_precision = 11"),
    "later tokens hidden of longer keys": written("is_causal = 1"),
}


@pytest.mark.parametrize("form", STAYS)
def test_what_stays_is_as_it_was(tmp_path: Path, form: str) -> None:
    made = fused(STAYS[form], tmp_path)
    before = [node.op_type for node in onnx.parser.parse_model(STAYS[form]).graph.node if node.op_type != "Constant"]
    assert made.outcomes == () and operators(made.graph.graph) == before


def test_masks_stay_where_no_kernel_is_faster_with_one(tmp_path: Path) -> None:
    gains = Gains(FLOATS, biased=False)
    for form, count in (("plain", 1), ("a mask that hides nothing", 1), ("mask", 0), ("later tokens hidden", 0)):
        assert len(fused(FORMS[form], tmp_path, gains).outcomes) == count
