"""Scores that are changed before their Softmax in unusual ways: most attention stays as it is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from tests.conftest import run_whole
from tests.helpers.needs import needs_caches

pytestmark = needs_caches
# Four heads of 16, and a cache. Scores s become weights w.
DECODER = """<ir_version: 8, opset_import: ["" : 17]>
g (float[b, t, 64] x, float[b, 4, p, 16] past_k, float[b, 4, p, 16] past_v)
    => (float[b, t, 64] y, float[b, 4, all, 16] k, float[b, 4, all, 16] v)
<int64[4] heads = {{0, 0, 4, 16}}, int64[3] flat = {{0, 0, 64}}, int64[1] zero = {{0}}, int64[1] one = {{1}},
 int64[1] two = {{2}}, int64[1] last = {{-1}}, int64[1] fourth = {{3}}, float quarter = {{0.25}}, float cap = {{2}},
 float shift = {{1}}, float low = {{-30000}}, float nothing = {{0}}> {{
    q0 = MatMul (x, wq)  q1 = Reshape (q0, heads)  q = Transpose <perm = [0, 2, 1, 3]> (q1)
    k0 = MatMul (x, wk)  k1 = Reshape (k0, heads)  k2 = Transpose <perm = [0, 2, 1, 3]> (k1)
    v0 = MatMul (x, wv)  v1 = Reshape (v0, heads)  v2 = Transpose <perm = [0, 2, 1, 3]> (v1)
    k = Concat <axis = 2> (past_k, k2)  v = Concat <axis = 2> (past_v, v2)
    k_turned = Transpose <perm = [0, 1, 3, 2]> (k)  product = MatMul (q, k_turned)  s = Mul (product, quarter)
    {steps}
    o = MatMul (w, v)  o1 = Transpose <perm = [0, 2, 1, 3]> (o)  o2 = Reshape (o1, flat)  y = MatMul (o2, wo) }}"""
ADDED = "r = Add (s, shift)"
SUBTRACTED = "most = ReduceMax <axes = [-1]> (s)  r = Sub (s, most)"
SOFTCAP = "c0 = Div (r, cap)  c1 = Tanh (c0)  c = Mul (c1, cap)  w = Softmax <axis = -1> (c)"
SINKS = """sizes = Shape (x)  rows = Slice (sizes, zero, one)  tokens = Slice (sizes, one, two)
    wide = Concat <axis = 0> (rows, one, tokens, one)  sinks = Expand (sink, wide)
    joined = Concat <axis = -1> (r, sinks)  both = Softmax <axis = -1> (joined)  w = Slice (both, zero, last, fourth)"""
END = "w = Softmax <axis = -1> (r)"
FORMS = {
    "a number, then a softcap": f"{ADDED} {SOFTCAP}",
    "the row's maximum, then a softcap": f"{SUBTRACTED} {SOFTCAP}",
    "a number, then sinks": f"{ADDED} {SINKS}",
    "the row's maximum, then sinks": f"{SUBTRACTED} {SINKS}",
    "the best two": f"best, places = TopK (s, two)  least = ReduceMin <axes = [-1]> (best)  worse = Less (s, least) "
    f"r = Where (worse, low, s) {END}",
    "a threshold": f"worse = Less (s, nothing)  r = Where (worse, low, s) {END}",
    "twice": f"r = Add (s, s) {END}",
    "a mask that is cut from a triangle of 64 tokens": f"""sizes = Shape (k)  all_tokens = Gather (sizes, two)
        own = Shape (x)  tokens = Gather (own, one)  before = Sub (all_tokens, tokens)
        rows = Slice (triangle, before, all_tokens, two, one)  mask = Slice (rows, zero, all_tokens, fourth, one)
        r = Where (mask, s, low) {END}""",
    "a scale by their sum": f"sizes = ReduceL1 <axes = [-1]> (s)  r = Div (s, sizes) {END}",
}


# Those that are run as planned for CPUs too: one of each kind of change.
ON_CPUS = ("a number, then a softcap", "the row's maximum, then sinks", "the best two", "twice", *[*FORMS][-2:])


@pytest.mark.parametrize(("form", "device"), [(form, "cuda0") for form in FORMS] + [(form, "cpu0") for form in ON_CPUS])
def test_results_are_those_of_the_model(tmp_path: Path, form: str, device: str) -> None:
    """Also of the graph for GPUs, which is run on the CPU."""
    model, random = onnx.parser.parse_model(DECODER.format(steps=FORMS[form])), np.random.default_rng(0)
    for name, shape in (*((f"w{part}", (64, 64)) for part in "qkvo"), ("sink", (1, 4, 1, 1))):
        weight = (random.standard_normal(shape) / 3).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(weight, name))
    model.graph.initializer.append(numpy_helper.from_array(np.tri(64, dtype=bool)[None, None], "triangle"))
    onnx.save(model, tmp_path / "model.onnx")
    shapes = {"x": (1, 3, 64), "past_k": (1, 4, 5, 16), "past_v": (1, 4, 5, 16)}
    plan = plan_model(tmp_path / "model.onnx", [device], Request(memory=["1GiB"], shapes=shapes))
    compile_model(plan, tmp_path / "package", verify=False)
    feeds = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    with Session(tmp_path / "package", devices=["cpu0"]) as session:
        for name, expected in run_whole(tmp_path / "model.onnx", feeds).items():
            np.testing.assert_allclose(session.run(feeds)[name], expected, rtol=0, atol=1e-5)
