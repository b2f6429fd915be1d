"""Keeps the caches of multi-head latent attention in place on GPUs, by an operator of the compiler's own.

LatentAttention computes softmax(scale x (q C' + p S') + bias) C for each head. C are latents and S keys that all heads
share, such as those with rotary embedding. Both are caches [batch, 1, rows, size] of the same length. ONNX Runtime has
no such operator: engine_graphs/decomposed_attention.py decomposes it in engines.

Inputs, at the places of GroupQueryAttention's: q [batch, heads, length, rank], new rows of S and C [batch, 1, length,
size], their pasts, the index of the last filled row for each row of the batch, the number of filled rows with the new
ones, p [batch, heads, length, size], two that are absent, and the bias, which may be absent too. Outputs: the weighed
latents [batch, heads, length, rank], and the presents of S and C. The attribute `sizes` has the last sizes of S and C.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.attention.bias import write_bias
from splitc.compiler.attention.multi_head import Writing
from splitc.compiler.caches.cache import Caches
from splitc.compiler.caches.lengths import Filled, Lengths
from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.matching import is_onnx
from splitc.compiler.operators.gpu_kernels import LATENT
from splitc.compiler.patterns.errors import NotFusedError
from splitc.compiler.patterns.sizes import fixed_axis
from splitc.compiler.patterns.writing import Writer

DOMAIN, _, OPERATOR = LATENT.rpartition(".")
# The first opset in which all operators of the decomposition exist as they are used there.
OPSET = 13


@dataclass(frozen=True)
class LatentCaches:
    """The caches of shared keys and of latents, in this order, and their filled rows."""

    presents: tuple[ir.Value, ir.Value]
    pasts: tuple[ir.Value, ...]
    added: tuple[ir.Value, ...]
    filled: Filled
    lengths: Lengths

    def check(self, stale: Collection[ir.Value]) -> None:
        """Raise NotFusedError if sizes of caches, or of `stale` values computed from them, can't be read elsewhere."""
        for past, present in zip(self.pasts, self.presents, strict=True):
            if {use.node for use in past.uses() if not is_onnx(use.node, "Shape")} != {present.producer()}:
                raise NotFusedError("its cache has other readers")
        self.lengths.check_sizes([*self.pasts, *stale], self.filled)

    def attend(self, queries: Sequence[ir.Value], rank: int, scale: float, writing: Writing) -> Sequence[ir.Value]:
        """Add the operator, for queries of shared keys and of latents [batch, heads, length, size].

        Returns the weighed latents [batch, heads, length, rank], and the presents.
        """
        attention, frame, work, (shared, own) = writing.attention, writing.frame, writing.work, queries
        bias = self.filled.with_room(write_bias(attention, frame, work), work) if attention.biases else None
        lengths = (self.filled.lasts, self.filled.total)
        sizes = [work.axes(query)[-1].fixed or 1 for query in queries]
        node = ir.node(
            OPERATOR,
            [own, *self.added, *self.pasts, *lengths, shared, *([] if bias is None else [None, None, bias])],
            {"num_heads": frame.head_count, "kv_num_heads": 1, "sizes": sizes, "scale": scale, "causal": 0},
            domain=DOMAIN,
            num_outputs=3,
        )
        work.insert(node)
        weighed, *presents = node.outputs
        work.name_value(weighed, "weighed", own, [frame.batch, frame.heads, frame.length, fixed_axis(rank)])
        for made, present in zip(presents, self.presents, strict=True):
            work.name_value(made, "present", present, work.axes(present))
        return writing.blanked(writing.guarded(weighed)), *presents

    def replace(self, presents: Sequence[ir.Value], stale: Collection[ir.Value], work: Writer) -> None:
        """Put the operator's presents in place of the model's. What reads sizes of the old ones reads others."""
        self.lengths.rewrite_sizes([*self.pasts, *stale], self.filled)
        for made, present in zip(presents, self.presents, strict=True):
            work.take_place(made, present)
        self.lengths.are_in_place(self.pasts, self.filled, one_row=False)


def find_latent_caches(
    latent: ir.Value, parts: Sequence[ir.Value], caches: Caches, lengths: Lengths, editor: Editor
) -> LatentCaches:
    """The caches of an attention on a latent, whose keys share these other `parts`.

    Raises NotFusedError if the operator can't keep them in place.
    """
    if editor.graph.opset_imports.get("", 1) < OPSET:
        raise NotFusedError(f"the model's opset is below {OPSET}, whose operators its cache needs")
    if len(parts) != 1 or not caches.keys() >= {latent, *parts}:
        raise NotFusedError("its keys are not a cached latent and one more cache, of four axes each")
    presents = (parts[0], latent)
    if not all(is_onnx(value.producer(), "Concat") for value in presents):
        raise NotFusedError("its caches are not concatenated with new rows")
    pasts, added = zip(*(caches[present] for present in presents), strict=True)
    filled = [lengths.of(*values) for values in zip(pasts, added, presents, strict=True)]
    if filled[0] is not filled[1]:
        raise NotFusedError("its two caches differ in length")
    return LatentCaches(presents, pasts, added, filled[0], lengths)
