"""Where a fused operator is the faster one."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from splitc.runtime.engines.kinds import ONNXRUNTIME
from splitc.runtime.hardware.devices import Device

# The types of numbers in which MultiHeadAttention is the faster one on CUDA. Measured on an H100 with ONNX Runtime 1.31
# by tests/benchmarks/fused_attention.py: 1.07 to 4.1 times as fast in half precision; 0.81 and 1.05 times in single
# precision, for which there is no flash attention.
FASTER = frozenset({ir.DataType.FLOAT16})
# Scores of a head, with the planned sizes, from which on it is. The smallest that was measured to gain had 257 x 257;
# in models with some 77 x 77 the added layout changes took as long as the kernel saved, or longer.
LEAST_SCORES = 1 << 16


def gains_by_fusion(engine: str, devices: Sequence[Device]) -> bool:
    """Whether an engine on these devices is faster with attention as one operator.

    ONNX Runtime's CUDA provider does not fuse most exporters' attention by itself, and writes all scores to memory. On
    the CPU the operator is as often slower as faster. TensorRT fuses by itself.
    """
    return engine == ONNXRUNTIME and all(device.kind == "cuda" for device in devices)
