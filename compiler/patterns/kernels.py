"""Tables of measurements: on which devices, for which types and from which sizes on fused operators are faster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.operators.gpu_kernels import HALVES
from splitc.compiler.patterns.errors import NotFusedError
from splitc.runtime.engines.kinds import ONNXRUNTIME
from splitc.runtime.hardware.devices import Device

Types = frozenset[ir.DataType]
NONE: Types = frozenset()


@dataclass(frozen=True)
class Gains:
    """Where fused operators are faster on a kind of device. Each set holds the element types that a fusion is for.

    - `attention`: MultiHeadAttention, with at least `least_scores` scores a head and `least_keys` keys at the planned
      sizes, and heads of up to `largest_head`. Unless `biased`, only without a mask or bias.
    - `parts`: norms and rotary embeddings. `modulations`: adaptive norms.
    - `caches`: caches in place. `has_room`: a cache's capacity is the size of an input of its own, so that consecutive
      requests have the same sizes. Unless `capped`, decomposed attention with a softcap is not fused with its cache.
    - `most_absorbed`: attention with up to this many tokens a request is computed on its latents, if these are then in
      place, even if that takes more operations.
    - `scattered`: caches that are written by index.
    - `rows`: elementwise operators and norms as one kernel that reads each row once (engine_graphs/fused_rows.py).
    - `experts`: mixtures of experts as one operator.
    - `divided`: products whose result is split by columns, with at least `least_rows` rows.
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
    most_absorbed: int = 0
    scattered: Types = NONE
    rows: Types = NONE
    experts: Types = NONE
    divided: Types = NONE
    least_rows: int = 0


SINGLES = frozenset({ir.DataType.FLOAT})

# Measured on an H100 with ONNX Runtime 1.31 by tests/benchmarks/fused_attention.py. How many times as fast as the
# decomposed form:
# - Attention in half precision: 1.06 to 4.9. In single precision, for which there is no flash attention: 0.79 and
#   1.06. Heads of 512: 0.45 (flash attention ends at 256). The smallest that gained had 257 x 257 scores. With 77 x
#   77, the added layout changes take as long as the kernel saves, or longer.
# - RMSNorm: 4 to 4.7. Rotary embedding: 2.0 to 4. In single precision, a token of 8 layers of 2,048 takes 1.86 ms on an
#   H200 with both, and norms with the additions before them, and 2.0 without; a prompt of 512 tokens 14.5 and 15.0.
# - Three products instead of one and a Split: 1.2 to 1.6 with 2,048 rows or more. A gated layer's two: 1.1, and 1.3
#   with a bias and a Gelu that are fused then. Fewer rows were not measured.
# - In bfloat16, on an H200: attention 1.4 to 4.8, RMSNorm 5.4 to 6.2, rotary embedding 1.6 to 3.1, modulated norms 1.8,
#   norms with the additions before them 1.3 to 1.8, three products 1.7 and 1.9. A token of 8 layers of 2,048 takes 1.14
#   ms with its cache in place, and 4.5 as exported.
# ONNX's own Attention is slower than MultiHeadAttention: on an H200, a step of Flux takes 79 ms instead of 70, and
# one of SDXL, with heads of 64, 469 ms instead of 48.5. Caches of attention with a softcap were not measured. They
# are in place because only then tokens can be replayed. GroupQueryAttention has no CUDA kernel in single precision,
# so it is decomposed again, with the cache in place (engine_graphs/decomposed_attention.py): a token of 8 layers of
# 2,048 takes 2.1 ms on an H200, and 4.4 with a concatenated cache. A token of 8 layers with latents in place takes
# 1.3 ms, and 3.8 concatenated. The most tokens for which they are in place is a choice: with DeepSeek-V3's sizes, a
# prompt of 2,048 takes 50 TFLOP more so, some 0.1 s on an H200, which the first ten tokens save.
ON_GPUS = Gains(
    HALVES,
    1 << 16,
    largest_head=256,
    parts=HALVES | SINGLES,
    modulations=HALVES,
    caches=HALVES | SINGLES,
    has_room=True,
    most_absorbed=1 << 11,
    rows=HALVES,
    experts=HALVES,
    divided=HALVES,
    least_rows=1 << 11,
)


# Measured on a CPU core by tests/benchmarks/fused_attention.py. How many times as fast as the decomposed form:
# - MultiHeadAttention without a bias, which does not write the scores to memory: 1.03 to 1.06 with 512 x 512 scores,
#   1.1 to 1.4 from 1,024 x 1,024 on, 0.91 to 1.2 with 77 keys. With a bias: 0.97 to 1.04. Causal attention saves
#   nothing: all scores are computed. ONNX's own Attention is as slow as the decomposed form.
# - Decoders of the tests' sizes with norms and rotary embeddings as operators: 1.05 to 1.2.
# - Adaptive norms: 1.3 for one image, 0.6 for two.
# - Attention with a softcap: a prompt of 512 tokens with 16 heads of 64 takes 42 ms, by ONNX's own Attention too, and
#   10 ms decomposed.
#
# Caches, by tests/benchmarks/cache_in_place.py, with decoders of 12 and 24 layers of 1,024, as transformers' exporter
# and optimum's write them:
# - A token after 64, 512 and 2,000 others, in a sequence with a capacity: 1.04 to 1.08, 1.2, and 1.5 to 1.7. With fed
#   pasts: 1.01 to 1.45. A prompt of 512: 1.00 to 1.12. A batch of 2 with 8 tokens each, by the engine's branch for
#   such requests (engine_graphs/several_rows.py): 1.01 to 1.18 after 100 tokens, 1.05 to 1.35 after 1,000.
# - Caches of 2,048 rows of 4 x 64 or 8 x 128 numbers that are written by index: a token takes 0.15 or 0.94 ms with
#   transposes, and 0.01 or 0.02 ms by ScatterElements. A prompt of 512 takes 0.15 or 1.3 ms with transposes, and 0.4
#   or 3.1 ms without: some hundredths of its layer's time.
# Half precision was not measured on CPUs.
ON_CPUS = Gains(SINGLES, 1 << 18, 512, biased=False, parts=SINGLES, caches=SINGLES, capped=False, scattered=SINGLES)


def gains_of(engine: str, devices: Sequence[Device]) -> Gains | None:
    """Where fused operators are faster for an engine on these devices; None if splitc does not fuse for it.

    ONNX Runtime recognizes the patterns of few exporters, so splitc fuses for it. TensorRT fuses most by itself.
    """
    kinds = {device.kind for device in devices}
    if engine != ONNXRUNTIME or len(kinds) != 1:
        return None
    return {"cuda": ON_GPUS, "cpu": ON_CPUS}.get(kinds.pop())


def check_type(value: ir.Value, types: Types) -> None:
    """Raise NotFusedError unless a value is of one of these types."""
    if (dtype := value.dtype) not in types:
        raise NotFusedError(f"no fused kernel is faster for its type, {'unknown' if dtype is None else dtype.name}")
