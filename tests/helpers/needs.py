"""What tests need of the ONNX Runtime that is installed: Python 3.10 has none after 1.23."""

from __future__ import annotations

import onnxruntime as ort
import pytest

from splitc.compiler.fusion.grouped import is_known

needs_dlpack = pytest.mark.skipif(
    not hasattr(ort.OrtValue, "from_dlpack"), reason="needs OrtValue.from_dlpack of ONNX Runtime"
)
needs_caches = pytest.mark.skipif(
    not is_known(), reason="the ONNX Runtime that is installed has no operator for caches in place"
)
needs_empty_weights = pytest.mark.skipif(
    ort.__version__.startswith("1.23."), reason="ONNX Runtime 1.23 divides by the size of an empty weight"
)
needs_float8_outputs = pytest.mark.skipif(
    ort.__version__.startswith("1.23."), reason="ONNX Runtime 1.23 gives no float8 as an output"
)
