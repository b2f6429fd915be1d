"""Convolutions of halves for which cuDNN's heuristics have no plan, as in encoders of speech.

python -m pytest tests/gpu/test_gpu_convolutions.py -m gpu -n 0
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

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not list_gpus(), reason="needs a GPU")]
CHANNELS, GROUPS, KERNEL = 1024, 16, 128
WRITTEN = f"""<ir_version: 9, opset_import: ["" : 17]>
    positions (float16[b, {CHANNELS}, frames] x, float16[{CHANNELS}, {CHANNELS // GROUPS}, {KERNEL}] weight)
        => (float16[b, {CHANNELS}, n] y) {{
        y = Conv <group = {GROUPS}, pads = [{KERNEL // 2}, {KERNEL // 2}]> (x, weight) }}"""


def model(folder: Path) -> Path:
    graph = onnx.parser.parse_model(WRITTEN)
    shape = (CHANNELS, CHANNELS // GROUPS, KERNEL)
    weight = np.random.default_rng(0).standard_normal(shape) / np.sqrt(KERNEL * CHANNELS // GROUPS)
    graph.graph.initializer.append(onnx.numpy_helper.from_array(weight.astype(np.float16), "weight"))
    del graph.graph.input[1]
    onnx.save(graph, folder / "model.onnx")
    return folder / "model.onnx"


def test_wide_kernels_in_groups_have_a_plan(tmp_path: Path) -> None:
    """Once the six requests of a length were made, the last are replayed."""
    path = model(tmp_path)
    shapes = {"x": (1, CHANNELS, 499)}
    compile_model(plan_model(path, ["cuda0"], Request(shapes=shapes)), tmp_path / "package", verify=False)
    with Session(tmp_path / "package") as session:
        for frames in (499, 50):
            for seed in range(6):
                request = {"x": np.random.default_rng(seed).standard_normal((1, CHANNELS, frames)).astype(np.float16)}
                expected = run_whole(path, request)["y"].astype(np.float32)
                np.testing.assert_allclose(session.run(request)["y"].astype(np.float32), expected, rtol=0, atol=2e-2)
        assert session.metrics.replayed
