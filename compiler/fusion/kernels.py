"""Where a fused operator is the faster one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from splitc.runtime.engines.kinds import ONNXRUNTIME
from splitc.runtime.hardware.devices import Device


@dataclass(frozen=True)
class Gains:
    """Where fused operators are the faster ones: in numbers of these `types`.

    MultiHeadAttention from so many scores a head on, with the planned sizes, and up to heads of `largest_head`.
    """

    types: frozenset[ir.DataType]
    least_scores: int
    largest_head: float = math.inf


# Measured on an H100 with ONNX Runtime 1.31 by tests/benchmarks/fused_attention.py. In halves attention is 1.06 to 4.9
# times as fast. In single precision, for which there is no flash attention, it is 0.79 and 1.06 times, and with a head
# of 512, for which there is none either (it ends at 256), 0.45 times. The fewest scores that were measured to gain
# are 257 x 257; in models with some 77 x 77 the added layout changes took as long as the kernel saved, or longer.
ON_GPUS = Gains(frozenset({ir.DataType.FLOAT16}), 1 << 16, 256)


def gains_by_fusion(engine: str, devices: Sequence[Device]) -> bool:
    """Whether an engine on these devices is faster with attention as one operator.

    ONNX Runtime's CUDA provider does not fuse most exporters' attention by itself, and writes all scores to memory. On
    the CPU the operator is as often slower as faster. TensorRT fuses by itself.
    """
    return engine == ONNXRUNTIME and all(device.kind == "cuda" for device in devices)
