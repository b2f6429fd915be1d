"""An Einsum of queries with keys that lack an axis: one head of keys for all queries, or for a group of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from splitc.compiler.analysis.facts import analyze
from splitc.compiler.fusion.fuse import Fused, fuse
from splitc.compiler.request.shapes import AskedShapes
from tests.compiler.fusion.test_fuse import ANY, run

# The equations of scores and results, and the axes of queries, keys and values.
FORMS = {
    "for all heads": ("bhid,bjd->bhij", "bhij,bjd->bhid", "b, 4, i, 8", "b, j, 8"),
    "queries by rows": ("bihd,bjd->bhij", "bhij,bjd->bihd", "b, i, 4, 8", "b, j, 8"),
    "keys first": ("bjd,bhid->bhij", "bjd,bhij->bhid", "b, 4, i, 8", "b, j, 8"),
    "keys times queries": ("bjd,bhid->bhji", "bjd,bhij->bhid", "b, 4, i, 8", "b, j, 8"),
    "for a group": ("bghid,bhjd->bghij", "bghij,bhjd->bghid", "b, 2, 4, i, 8", "b, 4, j, 8"),
    "for consecutive heads": ("bhgid,bhjd->bhgij", "bhgij,bhjd->bhgid", "b, 4, 2, i, 8", "b, 4, j, 8"),
    "any leading axes": ("...hid,...jd->...hij", "...hij,...jd->...hid", "b, 4, i, 8", "b, j, 8"),
}
# The last axes of these scores are groups and keys: their tokens are no rows.
JOINED = ("bikgd,bjkd->bikgj", "bikgj,bjkd->bikgd", "b, i, 2, 4, 8", "b, j, 2, 8")


def model(scores: str, result: str, query: str, keys: str) -> onnx.ModelProto:
    turned = "t = Transpose <perm = [0, 1, 3, 2]> (s)" if scores.endswith("ji") else "t = Identity (s)"
    made = ", ".join("abcdef"[: query.count(",") + 1])
    first, last = ("k, q", "v, w") if scores.startswith("bjd") else ("q, k", "w, v")
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[{query}] q, float[{keys}] k, float[{keys}] v) => (float[{made}] y) {{
            s = Einsum <equation = "{scores}"> ({first})  {turned}  w = Softmax <axis = -1> (t)
            y = Einsum <equation = "{result}"> ({last}) }}""")


def fused(made: onnx.ModelProto, folder: Path, query: str, keys: str) -> tuple[Fused, dict[str, np.ndarray]]:
    """The fused model for two rows, six queries and seven keys, and inputs of other sizes."""
    onnx.save(made, folder / "model.onnx")

    def shape(axes: str, b: int, i: int, j: int) -> tuple[int, ...]:
        return tuple({"b": b, "i": i, "j": j}.get(axis) or int(axis) for axis in axes.split(", "))

    planned = {name: shape(query if name == "q" else keys, 2, 6, 7) for name in "qkv"}
    analysis = analyze(folder / "model.onnx", AskedShapes(planned), 1)
    random = np.random.default_rng(0)
    feeds = {
        name: random.standard_normal(shape(query if name == "q" else keys, 3, 5, 9)).astype(np.float32)
        for name in "qkv"
    }
    return fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ANY), feeds


@pytest.mark.parametrize("form", FORMS)
def test_keys_are_repeated_for_the_operator(tmp_path: Path, form: str) -> None:
    made = model(*FORMS[form])
    result, feeds = fused(made, tmp_path, *FORMS[form][2:])
    assert [(one.operator, one.why) for one in result.outcomes] == [("MultiHeadAttention", None)]
    np.testing.assert_allclose(run(ir.to_proto(result.graph.model), feeds), run(made, feeds), rtol=0, atol=1e-5)


@pytest.mark.parametrize("tokens", ["i", "6"])
def test_keys_are_not_repeated_for_tokens(tmp_path: Path, tokens: str) -> None:
    """Nor where both numbers are fixed, and there are more tokens than heads in a group."""
    scores, result, query, keys = JOINED
    axes = query.replace("i", tokens)
    made, _ = fused(model(scores, result, axes, keys), tmp_path, axes, keys)
    assert [(one.operator, one.why is None) for one in made.outcomes] == [(None, False)]
