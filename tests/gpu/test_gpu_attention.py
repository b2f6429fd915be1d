"""Attention with a mask whose numbers of queries and keys differ, at lengths that not all of its kernels take.

python -m pytest tests/gpu/test_gpu_attention.py -m gpu -n 0
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.hardware.gpus import list_gpus
from tests.conftest import run_whole
from tests.helpers.written_attention import operators

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not list_gpus(), reason="needs a GPU")]
HEADS, SIZE = 4, 64
WRITTEN = f"""<ir_version: 9, opset_import: ["" : 17]>
    cross (float16[b, {HEADS}, s, {SIZE}] q, float16[b, {HEADS}, a, {SIZE}] k, float16[b, {HEADS}, a, {SIZE}] v,
           float16[b, 1, s, a] mask) => (float16[b, {HEADS}, s, {SIZE}] y) <float factor = {{0.125}}> {{
        scale = Cast <to = 10> (factor)  columns = Transpose <perm = [0, 1, 3, 2]> (k)
        scores = MatMul (q, columns)  scaled = Mul (scores, scale)
        masked = Add (scaled, mask)  weights = Softmax <axis = -1> (masked)  y = MatMul (weights, v) }}"""


def feeds(queries: int, keys: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    sizes = {"q": (2, HEADS, queries, SIZE), "k": (2, HEADS, keys, SIZE), "v": (2, HEADS, keys, SIZE)}
    made = {name: random.standard_normal(shape).astype("f2") for name, shape in sizes.items()}
    return made | {"mask": np.where(random.random((2, 1, queries, keys)) < 0.2, -1e4, 0).astype("f2")}


def test_rows_of_a_mask_have_any_length(tmp_path: Path) -> None:
    """Once the six requests of a length were made, the last are replayed."""
    onnx.save(onnx.parser.parse_model(WRITTEN), tmp_path / "model.onnx")
    shapes = {name: array.shape for name, array in feeds(512, 512, 0).items()}
    plan = plan_model(tmp_path / "model.onnx", ["cuda0"], Request(split_mode="layer", shapes=shapes))
    assert "com.microsoft.MultiHeadAttention" in operators(plan.analysis.graph.graph)
    compile_model(plan, tmp_path / "package", verify=False)
    with Session(tmp_path / "package") as session:
        for lengths in ((64, 77), (64, 80), (5, 77), (512, 100), (16, 13)):
            for seed in range(6):
                request = feeds(*lengths, seed)
                expected = run_whole(tmp_path / "model.onnx", request)["y"].astype(np.float32)
                np.testing.assert_allclose(session.run(request)["y"].astype(np.float32), expected, rtol=0, atol=2e-2)
        assert session.metrics.replayed
