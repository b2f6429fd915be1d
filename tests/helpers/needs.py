"""Tests that an older ONNX Runtime can't run: Python 3.10 has none after 1.23."""

from __future__ import annotations

import onnxruntime as ort
import pytest

from splitc.compiler.caches.grouped import is_known
from splitc.compiler.fusion.experts import computes_gates

needs_dlpack = pytest.mark.skipif(
    not hasattr(ort.OrtValue, "from_dlpack"), reason="needs OrtValue.from_dlpack of ONNX Runtime"
)
needs_caches = pytest.mark.skipif(
    not is_known(), reason="the ONNX Runtime that is installed has no operator for caches in place"
)
needs_gated_experts = pytest.mark.skipif(
    not computes_gates(), reason="the operator MoE of the ONNX Runtime that is installed computes no gates"
)
IS_OLD = ort.__version__.startswith("1.23.")
# Kernels and forms of operators that came later: DeformConv, opset 24, Max of bytes.
needs_later_operators = pytest.mark.skipif(IS_OLD, reason="ONNX Runtime 1.23 lacks a form of an operator")
needs_packed_weights = pytest.mark.skipif(IS_OLD, reason="MatMulNBits of ONNX Runtime 1.23 has no weight_prepacked")
needs_empty_weights = pytest.mark.skipif(IS_OLD, reason="ONNX Runtime 1.23 divides by the size of an empty weight")
needs_float8_outputs = pytest.mark.skipif(IS_OLD, reason="ONNX Runtime 1.23 gives no float8 as an output")
# 1.23 holds more parts of a stack at a time while it loads: its peak is 15 % above the prediction.
needs_parts_freed = pytest.mark.skipif(IS_OLD, reason="ONNX Runtime 1.23 needs more memory to load stacked weights")
needs_delta_net = pytest.mark.skipif(
    tuple(map(int, ort.__version__.split(".")[:2])) < (1, 32), reason="ONNX Runtime 1.31 has no CPU kernel for it"
)


def need_experts(form: str) -> None:
    """Skip the test if ONNX Runtime has no kernel for this form of mixture."""
    if form == "quantized" and IS_OLD:
        pytest.skip("QMoE of ONNX Runtime 1.23 wants the weights of SwiGLU, and is wrong without blocks")
