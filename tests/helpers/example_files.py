"""The models, packages and inputs that pages of the documentation name. Each is made when a page first needs it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
from tokenizers import Tokenizer, models, pre_tokenizers

from models.llama import Size, build
from models.writer import save
from splitc.compiler import Request, compile_model, compile_pipeline, plan_model, plan_pipeline
from tests.helpers import encoder_decoders
from tests.helpers.adapters import random_pairs, write_kohya, write_peft
from tests.helpers.blocks import FLOAT, INT, Block
from tests.helpers.folders import diffusers_folder, text_encoder, write_decoders, write_json
from tests.helpers.mixtures import mixture

WORDS, WIDTH, LAYERS = 40, 256, 4
DECODER = Size(layers=2, hidden=256, heads=4, kv_heads=2, feed_forward=256, vocabulary=WORDS)
# Makes a file or folder at a path. It may need others of this table.
Maker = Callable[["Files", Path], object]


def language_model(path: Path) -> None:
    """A model without caches, from token ids and a mask to logits. It is wide enough for row mode."""
    b = Block()
    ids, mask = (b.input(name, INT, ["batch", "sequence"]) for name in ("input_ids", "attention_mask"))
    value = b.op("Gather", b.w("table", WORDS, WIDTH), ids)
    value = b.op("Mul", value, b.op("Cast", b.op("Unsqueeze", mask, b.ints(2)), to=int(FLOAT)))
    for layer in range(LAYERS):
        with b.scope(f"layers.{layer}"):
            up, down = (b.w(f"layers.{layer}.{name}", WIDTH, WIDTH) for name in ("up", "down"))
            value = b.op("Add", value, b.op("MatMul", b.op("Relu", b.op("MatMul", value, up)), down))
    b.give(b.op("MatMul", value, b.w("head", WIDTH, WORDS)), "logits", ["batch", "sequence", WORDS])
    save(b.model(), path)


def recurrent(path: Path) -> None:
    """Two recurrent cells written out as nodes, whose states splitc does not detect."""
    b = Block()
    value = b.input("x", FLOAT, ["n", 32])
    for name in ("hidden", "cell"):
        state = b.input(name, FLOAT, ["n", 32])
        value = b.op("Tanh", b.op("Add", value, b.op("MatMul", state, b.w(f"{name}.weight", 32, 32))))
        b.give(value, f"next_{name}", ["n", 32])
    b.give(b.op("MatMul", value, b.w("last", 32, 32)), "y", ["n", 32])
    save(b.model(), path)


def switched(path: Path, declared: str, condition: str) -> None:
    """A model that is one If, whose condition is an input."""
    layers = [f"m{n} = MatMul (h{n}, W) r{n} = Relu (m{n}) h{n + 1} = Add (h{n}, r{n})" for n in range(4)]
    branches = ", ".join(
        f"{name} = {name} () => (float[n, 32] out) {{ h0 = {first} (x) {' '.join(layers)} out = Identity (h4) }}"
        for name, first in (("then_branch", "Neg"), ("else_branch", "Exp"))
    )
    weight = "W = Constant <value = float[32, 32] {" + ", ".join(["0.01"] * 1024) + "}> ()"
    text = f"main (float[n, 32] x, {declared}) => (float[n, 32] y) {{ {weight} {condition} y = If (c) <{branches}> }}"
    ir.save(ir.from_onnx_text(f'<ir_version: 8, opset_import: ["" : 17]> {text}'), path)


def optimum_folder(folder: Path) -> None:
    """An encoder, and a decoder in optimum's three forms."""
    save(text_encoder(2).model(), folder / "encoder_model.onnx")
    write_decoders(folder, "use_cache_branch")


def tokenizer_folder(folder: Path) -> None:
    write_tokenizer(folder / "tokenizer.json")
    write_json(folder / "config.json", {"eos_token_id": 2})


def write_tokenizer(path: Path) -> None:
    """A tokenizer with a word for each token; all other words are the first one."""
    made = Tokenizer(models.WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(path))


def arrays(path: Path, **arrays: object) -> None:
    np.savez(path, **{name: np.asarray(array) for name, array in arrays.items()})  # type: ignore[arg-type]


def packaged(model: str) -> Maker:
    """A maker of a package of a model, or of a folder of models, on two CPU devices."""

    def make(files: Files, path: Path) -> None:
        source = files.make(model)
        if source.is_dir():
            compile_pipeline(plan_pipeline(source, ["2xcpu"], Request(split_mode="layer")), path, verify=False)
        else:
            compile_model(plan_model(source, ["2xcpu"], Request(split_mode="layer")), path)

    return make


def writes(make: Callable[[Path], object]) -> Maker:
    return lambda files, path: make(path)


def in_new_folder(make: Callable[[Path], object]) -> Maker:
    def create(files: Files, path: Path) -> None:
        path.mkdir()
        make(path)

    return create


# The layers of the language model that adapters are for.
UPS = {f"layers.{layer}.up": (WIDTH, WIDTH) for layer in range(LAYERS)}
QUERIES = {f"model.layers.{layer}.self_attn.q_proj": (WIDTH, WIDTH) for layer in range(LAYERS)}
IDS = np.arange(6).reshape(1, 6) % WORDS
MAKERS: Mapping[str, Maker] = {
    "model.onnx": writes(language_model),
    "llama.onnx": writes(lambda path: save(build(DECODER), path)),
    "mixture.onnx": writes(lambda path: save(mixture("loop").model(), path)),
    "recurrent.onnx": writes(recurrent),
    "decoder_model_merged.onnx": writes(
        partial(switched, declared="bool use_cache_branch", condition="c = Identity (use_cache_branch)")
    ),
    "vad.onnx": writes(
        partial(switched, declared="int64 sr", condition="k = Constant <value_int = 16000> () c = Equal (sr, k)")
    ),
    "package": packaged("model.onnx"),
    "decoder": packaged("llama.onnx"),
    "folder": writes(diffusers_folder),
    "pipeline": packaged("folder"),
    "whisper": in_new_folder(encoder_decoders.speech_folder),
    "t5": in_new_folder(encoder_decoders.text_folder),
    "llama": in_new_folder(encoder_decoders.genai_folder),
    "optimum": in_new_folder(optimum_folder),
    "style": writes(lambda path: write_peft(path, random_pairs(UPS, 8))),
    "pose.safetensors": writes(lambda path: write_kohya(path, random_pairs(UPS, 4, seed=1), 2)),
    "small": writes(lambda path: write_peft(path, random_pairs(QUERIES, 8))),
    "tokens.npz": writes(
        partial(arrays, input_ids=IDS, attention_mask=np.ones_like(IDS), position_ids=np.arange(6).reshape(1, 6))
    ),
    "tokenizer": in_new_folder(tokenizer_folder),
    "tokenizer.json": writes(write_tokenizer),
    "inputs.npz": writes(partial(arrays, input_ids=IDS, attention_mask=np.ones_like(IDS))),
    "latents.npz": writes(partial(arrays, latent_sample=np.zeros((1, 4, 8, 8), np.float32))),
    "speech.wav": writes(partial(encoder_decoders.write_sound, seed=1)),
}


class Files:
    """A folder with the files that pages name, made on demand."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def make(self, name: str) -> Path:
        """The file or folder of a name."""
        path = self._folder / name
        if not path.exists():
            MAKERS[name](self, path)
        return path

    def put(self, name: str, place: Path) -> None:
        """Put the file or folder of a name at another place, by hard links, which are fast."""
        source = self.make(name)
        if source.is_dir():
            shutil.copytree(source, place, copy_function=os.link)
        else:
            for path in self._folder.glob(f"{name}*"):  # and its weights beside it
                shutil.copy(path, place.with_name(path.name))
