"""The decoder of `models/llama.py` in ONNX Runtime's fused operators, as onnxruntime-genai's builder writes it.

    python models/llama_fused.py -o llama.onnx --layers 16 --hidden 2048 --heads 32 --kv-heads 8 --dtype fp16

One operator does all of the attention (rotary embedding and cache included), another the residual sum with its norm;
logits are those of the last token only. The cache may have room for what is to come: how far it is filled is counted in
the attention mask, which is as long as the cache then. So no size changes from token to token.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

if __package__ in (None, ""):  # run as a script: its siblings are not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models.llama import EPSILON, ROTARY_BASE, Decoder, Size, main


def build(size: Size) -> ir.Model:
    """The decoder as a model. Its weights are generated one at a time, when they are written."""
    return FusedDecoder(size).build()


class FusedDecoder(Decoder):
    """Writes the decoder's graph."""

    def build(self) -> ir.Model:
        w, size = self.writer, self.size
        ids = w.input("input_ids", ir.DataType.INT64, ["batch", "sequence"])
        mask = w.input("attention_mask", ir.DataType.INT64, ["batch", "total"])
        cache: list[int | str] = ["batch", size.kv_heads, "past", size.head]
        past = [
            [w.input(f"past_key_values.{layer}.{part}", size.dtype, cache) for part in ("key", "value")]
            for layer in range(size.layers)
        ]
        self.lengths = self.count(mask)
        self.tables = self.rotary_tables()
        presents = []
        with w.scope("model"):
            hidden: ir.Value | None = None
            added = w.op("Gather", self.weight("model.embed_tokens.weight", size.vocabulary, size.hidden, std=1.0), ids)
            for layer in range(size.layers):
                name = f"model.layers.{layer}"
                with w.scope(f"layers.{layer}"):
                    normed, hidden = self.add_norm(f"{name}.input_layernorm", hidden, added)
                    attended, present = self.attend(f"{name}.self_attn", normed, past[layer])
                    normed, hidden = self.add_norm(f"{name}.post_attention_layernorm", hidden, attended)
                    added = self.feed_forward(f"{name}.mlp", normed)
                presents.append(present)
            normed, _ = self.add_norm("model.norm", hidden, added)
            normed = w.op("Gather", normed, w.constant([-1], np.int64), axis=1)
        with w.scope("lm_head"):
            logits = w.op("MatMul", normed, self.weight("lm_head.weight", size.hidden, size.vocabulary))
        w.output(logits, "logits", size.dtype, ["batch", 1, size.vocabulary])
        cache[2] = "total"
        for layer, pair in enumerate(presents):
            for value, part in zip(pair, ("key", "value")):
                w.output(value, f"present.{layer}.{part}", size.dtype, cache)
        return w.model()

    def count(self, mask: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The last filled position of each cache, and the mask's length, which is known without reading the mask."""
        w, one = self.writer, self.writer.constant([1], np.int64)
        last = w.op("Sub", w.op("ReduceSum", mask, one, keepdims=0), one)
        total = w.op("Gather", w.op("Shape", mask), w.constant(1, np.int64), axis=0)
        return w.op("Cast", last, to=ir.DataType.INT32), w.op("Cast", total, to=ir.DataType.INT32)

    def rotary_tables(self) -> tuple[ir.Value, ir.Value]:
        """Cosines and sines by position: [longest, head / 2]."""
        steps = np.arange(0, self.size.head, 2, dtype=np.float32) / self.size.head
        angles = np.outer(np.arange(self.size.longest, dtype=np.float32), ROTARY_BASE**-steps)
        dtype = self.size.dtype.numpy()
        cosine, sine = (ir.tensor(table.astype(dtype)) for table in (np.cos(angles), np.sin(angles)))
        return self.writer.weight("cos_cache", cosine), self.writer.weight("sin_cache", sine)

    def add_norm(self, name: str, hidden: ir.Value | None, added: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The normalized sum of both, and the sum itself. The first norm has nothing to add."""
        w = self.writer
        scale = w.weight(f"{name}.weight", ir.tensor(np.ones(self.size.hidden, self.size.dtype.numpy())))
        if hidden is None:
            return w.op("SimplifiedLayerNormalization", added, scale, axis=-1, epsilon=EPSILON, stash_type=1), added
        normed, mean, deviation, total = w.ops(
            "com.microsoft.SkipSimplifiedLayerNormalization", hidden, added, scale, outputs=4, epsilon=EPSILON
        )
        mean.name = deviation.name = ""  # which nobody wants
        return normed, total

    def attend(self, name: str, normed: ir.Value, past: Sequence[ir.Value]) -> tuple[ir.Value, list[ir.Value]]:
        """Queries, keys and values in one projection, [q | k | v], and one operator for the rest."""
        w, size = self.writer, self.size
        width = (size.heads + 2 * size.kv_heads) * size.head
        joined = w.op("MatMul", normed, self.weight(f"{name}.qkv_proj.weight", size.hidden, width))
        attended, key, value = w.ops(
            "com.microsoft.GroupQueryAttention",
            *(joined, None, None, *past, *self.lengths, *self.tables),
            outputs=3,
            num_heads=size.heads,
            kv_num_heads=size.kv_heads,
            scale=1 / math.sqrt(size.head),
            do_rotary=1,
        )
        return w.op("MatMul", attended, self.out_weight(f"{name}.o_proj.weight", size.hidden)), [key, value]


if __name__ == "__main__":
    main(build)
