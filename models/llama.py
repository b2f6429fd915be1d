"""A decoder of any size, with past and present of its cache as inputs and outputs, as an exporter would write it.

    python models/llama.py -o llama.onnx --layers 16 --hidden 2048 --heads 32 --kv-heads 8 \\
        --feed-forward 5632 --vocabulary 32000 --dtype fp16

Weights are random, seeded by their names, and scaled so that activations keep their size from layer to layer. With
--sparse they are zeros in a sparse file: a model of 139 GB takes a second and no disk.
"""

from __future__ import annotations

import argparse
import math
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir

if __package__ in (None, ""):  # run as a script: its siblings are not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models.writer import Writer, save

DTYPES = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
EPSILON = 1e-5
ROTARY_BASE = 10000.0
# Experts that each token goes to.
CHOSEN = 2


@dataclass(frozen=True)
class Size:
    """The dimensions of a decoder.

    With a `capacity`, it takes one token at a time, and its caches have room for this many from the start. Tables of
    rotary embeddings, if there are any, have `longest` positions.
    """

    layers: int = 2
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    feed_forward: int = 688
    vocabulary: int = 2000
    dtype: ir.DataType = ir.DataType.FLOAT
    experts: int = 0
    capacity: int = 0
    longest: int = 8192

    @property
    def head(self) -> int:
        """The size of one head."""
        return self.hidden // self.heads

    def cache_shape(self, length: int) -> tuple[int, int, int]:
        """The shape of keys, or values, of this many tokens."""
        return self.kv_heads, length, self.head


def build(size: Size) -> ir.Model:
    """The decoder as a model. Its weights are generated one at a time, when they are written."""
    return Decoder(size).build()


def save_sparse(model: ir.Model, path: Path) -> None:
    """Write the model with a sparse data file of full size, which takes no disk space."""
    data = f"{path.name}.data"
    offset = 0
    for value in model.graph.initializers.values():
        tensor = value.const_value
        assert tensor is not None and value.dtype is not None
        shape, name = ir.Shape(tensor.shape.numpy()), value.name or ""
        value.const_value = ir.ExternalTensor(
            data, offset, tensor.nbytes, value.dtype, shape=shape, name=name, base_dir=path.parent
        )
        offset += tensor.nbytes
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / data).open("wb") as file:
        file.truncate(offset)
    ir.save(model, path)


class Decoder:
    """Writes the decoder's graph."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.writer = Writer()

    def build(self) -> ir.Model:
        w, size = self.writer, self.size
        new: int | str = 1 if size.capacity else "sequence"
        total: int | str = size.capacity or "past + sequence"
        ids = w.input("input_ids", ir.DataType.INT64, ["batch", new])
        mask = w.input("attention_mask", ir.DataType.INT64, ["batch", total])
        positions = w.input("position_ids", ir.DataType.INT64, ["batch", new])
        cache: list[int | str] = ["batch", size.kv_heads, size.capacity or "past", size.head]
        past = [
            [w.input(f"past_key_values.{layer}.{part}", size.dtype, cache) for part in ("key", "value")]
            for layer in range(size.layers)
        ]
        presents = []
        with w.scope("model"):
            with w.scope("embed_tokens"):
                hidden = w.op(
                    "Gather", self.weight("model.embed_tokens.weight", size.vocabulary, size.hidden, std=1.0), ids
                )
            bias = self.attention_bias(mask, positions)
            self.write = self.place(positions) if size.capacity else self.append
            cosine, sine = self.rotary(positions)
            for layer in range(size.layers):
                with w.scope(f"layers.{layer}"):
                    hidden, present = self.layer(f"model.layers.{layer}", hidden, past[layer], bias, (cosine, sine))
                presents.append(present)
            hidden = self.norm("model.norm", hidden)
        with w.scope("lm_head"):
            logits = w.op("MatMul", hidden, self.weight("lm_head.weight", size.hidden, size.vocabulary))
        w.output(logits, "logits", size.dtype, ["batch", new, size.vocabulary])
        cache[2] = total
        for layer, pair in enumerate(presents):
            for value, part in zip(pair, ("key", "value")):
                w.output(value, f"present.{layer}.{part}", size.dtype, cache)
        return w.model()

    def weight(self, name: str, *shape: int, std: float | None = None) -> ir.Value:
        """A random weight; the default spread keeps the scale of activations."""
        spread = 1 / math.sqrt(shape[-2]) if std is None else std

        def make() -> ir.TensorProtocol:
            generator = np.random.default_rng(zlib.crc32(name.encode()))
            array = generator.standard_normal(shape, dtype=np.float32) * np.float32(spread)
            return ir.tensor(array.astype(self.size.dtype.numpy()))

        return self.writer.weight(name, ir.LazyTensor(make, self.size.dtype, ir.Shape(shape), name=name))

    @property
    def lowest(self) -> float:
        """The lowest finite number of the decoder's type."""
        return float(ml_dtypes.finfo(self.size.dtype.numpy()).min)  # type: ignore[no-untyped-call]

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        return value if self.size.dtype == ir.DataType.FLOAT else self.writer.op("Cast", value, to=dtype)

    def attention_bias(self, mask: ir.Value, positions: ir.Value) -> ir.Value:
        """0 where a query may attend, the smallest number elsewhere: [batch, 1, sequence, past + sequence]."""
        w = self.writer
        present = w.op("Cast", w.op("Unsqueeze", mask, w.constant([1, 2], np.int64)), to=ir.DataType.BOOL)
        dtype = self.size.dtype.numpy()
        if self.size.capacity:  # the mask says all
            return w.op("Where", present, w.constant(0, dtype), w.constant(self.lowest, dtype))
        total = w.op("Shape", mask, start=1, end=2)
        length = w.op("Shape", positions, start=1, end=2)
        zero, one = w.constant(0, np.int64), w.constant(1, np.int64)
        axis = w.constant([0], np.int64)
        keys = w.op("Range", zero, w.op("Squeeze", total, axis), one)
        new = w.op("Range", zero, w.op("Squeeze", length, axis), one)
        queries = w.op("Add", new, w.op("Sub", total, length))
        causal = w.op("LessOrEqual", keys, w.op("Unsqueeze", queries, w.constant([1], np.int64)))
        allowed = w.op("And", causal, present)
        return w.op("Where", allowed, w.constant(0, dtype), w.constant(self.lowest, dtype))

    def append(self, past: ir.Value, new: ir.Value) -> ir.Value:
        """A cache with the new tokens appended."""
        return self.writer.op("Concat", past, new, axis=2)

    def place(self, positions: ir.Value) -> Callable[[ir.Value, ir.Value], ir.Value]:
        """Caches of a fixed size, with the new token at its position."""
        w = self.writer
        places = w.constant(np.arange(self.size.capacity), np.int64)
        here = w.op("Equal", w.op("Unsqueeze", positions, w.constant([1], np.int64)), places)
        taken = w.op("Unsqueeze", here, w.constant([3], np.int64))
        return lambda past, new: w.op("Where", taken, new, past)

    def rotary(self, positions: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Cosines and sines of the rotary embedding: [batch, 1, sequence, head]."""
        w = self.writer
        with w.scope("rotary_emb"):
            steps = np.arange(0, self.size.head, 2, dtype=np.float32) / self.size.head
            frequencies = w.constant(np.concatenate([ROTARY_BASE**-steps] * 2), np.float32)
            wide = w.op("Unsqueeze", w.op("Cast", positions, to=ir.DataType.FLOAT), w.constant([1, 3], np.int64))
            angles = w.op("Mul", wide, frequencies)
            cosine, sine = w.op("Cos", angles), w.op("Sin", angles)
            return self.cast(cosine, self.size.dtype), self.cast(sine, self.size.dtype)

    def norm(self, name: str, value: ir.Value) -> ir.Value:
        """RMS norm, in float32 whatever the model's type."""
        w = self.writer
        scale = w.weight(f"{name}.weight", ir.tensor(np.ones(self.size.hidden, self.size.dtype.numpy())))
        with w.scope(name.rpartition(".")[2]):
            wide = self.cast(value, ir.DataType.FLOAT)
            mean = w.op("ReduceMean", w.op("Pow", wide, w.constant(2, np.float32)), axes=[-1], keepdims=1)
            root = w.op("Sqrt", w.op("Add", mean, w.constant(EPSILON, np.float32)))
            normed = self.cast(w.op("Div", wide, root), self.size.dtype)
            return w.op("Mul", normed, scale)

    def layer(
        self, name: str, hidden: ir.Value, past: Sequence[ir.Value], bias: ir.Value, rotary: tuple[ir.Value, ir.Value]
    ) -> tuple[ir.Value, list[ir.Value]]:
        w = self.writer
        with w.scope("self_attn"):
            normed = self.norm(f"{name}.input_layernorm", hidden)
            attended, present = self.attention(f"{name}.self_attn", normed, past, bias, rotary)
        hidden = w.op("Add", hidden, attended)
        normed = self.norm(f"{name}.post_attention_layernorm", hidden)
        with w.scope("mlp"):
            feed = self.experts if self.size.experts else self.feed_forward
            return w.op("Add", hidden, feed(f"{name}.mlp", normed)), present

    def attention(
        self, name: str, normed: ir.Value, past: Sequence[ir.Value], bias: ir.Value, rotary: tuple[ir.Value, ir.Value]
    ) -> tuple[ir.Value, list[ir.Value]]:
        w, size = self.writer, self.size

        def project(part: str, heads: int) -> ir.Value:
            product = w.op("MatMul", normed, self.weight(f"{name}.{part}_proj.weight", size.hidden, heads * size.head))
            split = w.op("Reshape", product, w.constant([0, 0, heads, size.head], np.int64))
            return w.op("Transpose", split, perm=[0, 2, 1, 3])

        query = self.rotate(project("q", size.heads), rotary)
        key = self.write(past[0], self.rotate(project("k", size.kv_heads), rotary))
        value = self.write(past[1], project("v", size.kv_heads))
        every_key, every_value = self.repeat(key), self.repeat(value)
        scores = w.op("MatMul", query, w.op("Transpose", every_key, perm=[0, 1, 3, 2]))
        scaled = w.op("Mul", scores, w.constant(1 / math.sqrt(size.head), size.dtype.numpy()))
        attended = w.op("MatMul", w.op("Softmax", w.op("Add", scaled, bias), axis=-1), every_value)
        joined = w.op(
            "Reshape", w.op("Transpose", attended, perm=[0, 2, 1, 3]), w.constant([0, 0, size.hidden], np.int64)
        )
        return w.op("MatMul", joined, self.out_weight(f"{name}.o_proj.weight", size.hidden)), [key, value]

    def out_weight(self, name: str, width: int) -> ir.Value:
        """A weight that writes to the residual stream: the more layers, the smaller."""
        return self.weight(name, width, self.size.hidden, std=1 / math.sqrt(2 * self.size.layers * width))

    def rotate(self, value: ir.Value, rotary: tuple[ir.Value, ir.Value]) -> ir.Value:
        w, half = self.writer, self.size.head // 2
        axis = w.constant([3], np.int64)
        low = w.op("Slice", value, w.constant([0], np.int64), w.constant([half], np.int64), axis)
        high = w.op("Slice", value, w.constant([half], np.int64), w.constant([2 * half], np.int64), axis)
        turned = w.op("Concat", w.op("Neg", high), low, axis=-1)
        return w.op("Add", w.op("Mul", value, rotary[0]), w.op("Mul", turned, rotary[1]))

    def repeat(self, value: ir.Value) -> ir.Value:
        """Each key-value head for all query heads of its group."""
        w, size = self.writer, self.size
        if size.heads == size.kv_heads:
            return value
        group = size.heads // size.kv_heads
        shape = w.op("Shape", value)
        batch, length = (w.op("Slice", shape, w.constant([i], np.int64), w.constant([i + 1], np.int64)) for i in (0, 2))
        kv_heads, head = w.constant([size.kv_heads], np.int64), w.constant([size.head], np.int64)
        wide = w.op("Concat", batch, kv_heads, w.constant([group], np.int64), length, head, axis=0)
        expanded = w.op("Expand", w.op("Unsqueeze", value, w.constant([2], np.int64)), wide)
        return w.op("Reshape", expanded, w.constant([0, size.heads, -1, size.head], np.int64))

    def feed_forward(self, name: str, normed: ir.Value) -> ir.Value:
        w, size = self.writer, self.size
        gate = w.op("MatMul", normed, self.weight(f"{name}.gate_proj.weight", size.hidden, size.feed_forward))
        up = w.op("MatMul", normed, self.weight(f"{name}.up_proj.weight", size.hidden, size.feed_forward))
        inner = w.op("Mul", w.op("Mul", gate, w.op("Sigmoid", gate)), up)
        return w.op("MatMul", inner, self.out_weight(f"{name}.down_proj.weight", size.feed_forward))

    def experts(self, name: str, normed: ir.Value) -> ir.Value:
        """A mixture of experts, all computed as one batch of products, weighted by the router's choice of two."""
        w, size = self.writer, self.size
        count, inner_size = size.experts, size.feed_forward
        scores = w.op("MatMul", normed, self.weight(f"{name}.gate.weight", size.hidden, count))
        values, chosen = w.ops("TopK", scores, w.constant([CHOSEN], np.int64), outputs=2, axis=-1)
        nothing = w.op("Mul", scores, w.constant(0, size.dtype.numpy()))
        weights = w.op("ScatterElements", nothing, chosen, w.op("Softmax", values, axis=-1), axis=-1)
        # [batch, 1, sequence, hidden] x [experts, hidden, inner] -> [batch, experts, sequence, inner]
        every = w.op("Unsqueeze", normed, w.constant([1], np.int64))
        gate = w.op("MatMul", every, self.weight(f"{name}.experts.gate_proj", count, size.hidden, inner_size))
        up = w.op("MatMul", every, self.weight(f"{name}.experts.up_proj", count, size.hidden, inner_size))
        inner = w.op("Mul", w.op("Mul", gate, w.op("Sigmoid", gate)), up)
        std = 1 / math.sqrt(2 * size.layers * inner_size)
        outer = w.op("MatMul", inner, self.weight(f"{name}.experts.down_proj", count, inner_size, size.hidden, std=std))
        by_expert = w.op("Unsqueeze", w.op("Transpose", weights, perm=[0, 2, 1]), w.constant([3], np.int64))
        return w.op("ReduceSum", w.op("Mul", outer, by_expert), w.constant([1], np.int64), keepdims=0)


def main(build: Callable[[Size], ir.Model] = build) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, help="the ONNX file to write")
    for name in (field.name for field in fields(Size) if field.type == "int"):
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, default=getattr(Size, name), help=f"default {getattr(Size, name)}")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--sparse", action="store_true", help="zeros in a sparse file instead of random weights")
    options = vars(parser.parse_args())
    output, sparse = options.pop("output"), options.pop("sparse")
    options["dtype"] = DTYPES[options["dtype"]]
    (save_sparse if sparse else save)(build(Size(**options)), output)


if __name__ == "__main__":
    main()
