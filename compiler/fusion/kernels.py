"""Where a fused operator is the faster one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from splitc.runtime.engines.kinds import ONNXRUNTIME
from splitc.runtime.hardware.devices import Device

Types = frozenset[ir.DataType]
NONE: Types = frozenset()


@dataclass(frozen=True)
class Gains:
    """Where fused operators are the faster ones, by the types of their numbers.

    MultiHeadAttention from so many scores a head on, and so many keys, with the planned sizes, up to heads of
    `largest_head`, and, unless `biased`, only where nothing is added to the scores. Norms and rotary embeddings are the
    `parts`. `modulations` are those of norms, and `caches` those in place, whose room is a size of its own where it
    `has_room`; unless `capped`, not where what is written out caps scores by a Tanh, and with `sinks` only where those
    have a kernel. Those whose rows are written by
    index are `scattered`. Products whose columns are taken apart are `divided` from so many rows on.
    """

    attention: Types = NONE
    least_scores: int = 0
    least_keys: int = 0
    largest_head: float = math.inf
    biased: bool = True
    parts: Types = NONE
    modulations: Types = NONE
    caches: Types = NONE
    has_room: bool = False
    capped: bool = True
    sinks: bool = False
    scattered: Types = NONE
    divided: Types = NONE
    least_rows: int = 0


HALVES, SINGLES = frozenset({ir.DataType.FLOAT16}), frozenset({ir.DataType.FLOAT})

# Measured on an H100 with ONNX Runtime 1.31 by tests/benchmarks/fused_attention.py. In halves attention is 1.06 to 4.9
# times as fast. Where it is ONNX's own Attention, an H200 took 79 ms for Flux in place of 70, and 469 in place of 48.5
# for SDXL, whose heads are of 64. In single precision, for which there is no flash attention, it is 0.79 and 1.06
# times, and with a head of 512, for which there is none either (it ends at 256), 0.45 times. The fewest scores that
# were measured to gain are 257 x 257; in models with some 77 x 77 the added layout changes took as long as the kernel
# saved, or longer. RMSNorm is 4 to 4.7 times as fast, and a rotary embedding 2.0 to 4. Three products in place of one
# and a Split are 1.2 to 1.6 times as fast with 2048 rows or more, and a gated layer by two 1.1 times, 1.3 with its bias
# and Gelu as one operator; fewer rows were not measured. Nor were caches of attention whose scores a Tanh caps: in
# place, their tokens can be replayed.
ON_GPUS = Gains(
    HALVES,
    1 << 16,
    largest_head=256,
    parts=HALVES,
    modulations=HALVES,
    caches=HALVES,
    has_room=True,
    divided=HALVES,
    least_rows=1 << 11,
)


# Measured by tests/benchmarks/fused_attention.py on a core. Without a bias, the operator does not write the scores to
# memory: it is 1.03 to 1.06 times as fast with 512 x 512, and 1.1 to 1.4 times from 1024 x 1024 on; with 77 keys 0.91
# to 1.2 times, and with a bias 0.97 to 1.04. ONNX's own Attention is as slow as what is written out: MultiHeadAttention
# is 1.05 to 1.2 times as fast as it from 512 x 512 on. If it hides later tokens, it computes all scores too. With norms
# and rotary embeddings as operators decoders of the tests' sizes are 1.05 to 1.2 times as fast. A modulated norm is 1.3
# times as fast for one picture and 0.6 times for two.
#
# Caches by tests/benchmarks/cache_in_place.py: decoders of 12 and 24 layers that are 1024 wide, as transformers'
# exporter and optimum's write them. In a sequence with a capacity a token after 64, 512 and 2000 others is 1.04 to
# 1.08, 1.2 and 1.5 to 1.7 times as fast, after pasts that are fed 1.01 to 1.45 times, and a prompt of 512 is read 1.00
# to 1.12 times as fast. A cache of 2048 rows of 4 x 64 or 8 x 128 numbers that is written by index took a token 0.15 or
# 0.94 ms with its axes turned, and 0.01 or 0.02 ms where it is; a prompt of 512 took 0.15 or 1.3 ms, and 0.4 or 3.1 ms,
# which is some hundredths of its layer. Scores that a Tanh caps took 42 ms for a prompt of 512 with 16 heads of 64, and
# 10 ms as written out; ONNX's own Attention took 42 ms too. Half precision was not measured, nor were GPUs, on which
# there is no such kernel in single precision.
ON_CPUS = Gains(
    SINGLES, 1 << 18, 512, biased=False, parts=SINGLES, caches=SINGLES, capped=False, sinks=True, scattered=SINGLES
)


def gains_of(engine: str, devices: Sequence[Device]) -> Gains | None:
    """Where an engine on these devices is faster with fused operators; None if nowhere.

    ONNX Runtime fuses what most exporters write by itself in few models. TensorRT does.
    """
    kinds = {device.kind for device in devices}
    if engine != ONNXRUNTIME or len(kinds) != 1:
        return None
    return {"cuda": ON_GPUS, "cpu": ON_CPUS}.get(kinds.pop())
