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

    MultiHeadAttention from so many scores a head on, with the planned sizes, and up to heads of `largest_head`. Caches
    in place in numbers of the types `caches`.
    """

    types: frozenset[ir.DataType]
    least_scores: int
    largest_head: float = math.inf
    caches: frozenset[ir.DataType] = frozenset()


# Measured on an H100 with ONNX Runtime 1.31 by tests/benchmarks/fused_attention.py. In halves attention is 1.06 to 4.9
# times as fast. In single precision, for which there is no flash attention, it is 0.79 and 1.06 times, and with a head
# of 512, for which there is none either (it ends at 256), 0.45 times. The fewest scores that were measured to gain
# are 257 x 257; in models with some 77 x 77 the added layout changes took as long as the kernel saved, or longer.
ON_GPUS = Gains(frozenset({ir.DataType.FLOAT16}), 1 << 16, 256)


# Measured with ONNX Runtime 1.31 by tests/benchmarks/cache_in_place.py, in single precision: decoders of 12 and 24
# layers that are 1024 wide, as transformers' exporter and optimum's write them. In a sequence with a capacity a token
# after 64, 512 and 2000 others is 1.04 to 1.08, 1.2 and 1.5 to 1.7 times as fast, after pasts that are fed 1.01 to 1.45
# times, and a prompt of 512 is read 1.00 to 1.12 times as fast.
# Half precision was not measured, nor were GPUs, on which there is no such kernel in single precision.
ON_CPUS = Gains(frozenset(), 0, caches=frozenset({ir.DataType.FLOAT}))


def gains_of(engine: str, devices: Sequence[Device]) -> Gains | None:
    """Where an engine on these devices is faster with fused operators; None if nowhere.

    ONNX Runtime's CUDA provider does not fuse most exporters' attention by itself, and writes all scores to memory. On
    the CPU the operator is as often slower as faster, but for caches in place. TensorRT fuses by itself.
    """
    kinds = {device.kind for device in devices}
    if engine != ONNXRUNTIME or len(kinds) != 1:
        return None
    return {"cuda": ON_GPUS, "cpu": ON_CPUS}.get(kinds.pop())
