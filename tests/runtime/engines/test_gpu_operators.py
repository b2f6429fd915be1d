"""Sessions on GPUs call ONNX Runtime's operators where other sessions run functions of the same names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

from splitc.runtime.engines.onnx_session import FUNCTIONS, OPERATORS, call_operators, open_onnx

# The function adds 1, and the operator of the same name does not.
MODEL = f"""
    <ir_version: 9, opset_import: ["" : 20, "{FUNCTIONS}" : 1]>
    m (float[2, 3] x, float[3] bias) => (float[2, 3] y) {{ y = {FUNCTIONS}.BiasGelu (x, bias) }}
    <domain: "{FUNCTIONS}", opset_import: ["" : 20]>
    BiasGelu (a, b) => (c) {{
        total = Add (a, b)  gelu = Gelu (total)  one = Constant <value_float = 1.0> ()  c = Add (gelu, one)
    }}
"""


@pytest.mark.parametrize("trusts_data", [False, True])
def test_functions_are_operators_on_gpus(tmp_path: Path, trusts_data: bool) -> None:
    onnx.save(onnx.parser.parse_model(MODEL), tmp_path / "model.onnx")
    feeds = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.ones(3, np.float32)}
    plain, on_gpu = (
        open_onnx(tmp_path / "model.onnx", ort.SessionOptions(), ["CPUExecutionProvider"], trusts_data, on_gpu=on_gpu)
        for on_gpu in (False, True)
    )
    np.testing.assert_allclose(plain.run(None, feeds)[0], on_gpu.run(None, feeds)[0] + 1, rtol=1e-6)


def test_a_file_without_functions_stays() -> None:
    content = onnx.parser.parse_model(MODEL.replace(FUNCTIONS, "of.another.one")).SerializeToString()
    assert call_operators(content) is None


def test_both_domains_take_as_much_room() -> None:
    assert len(FUNCTIONS) == len(OPERATORS)
