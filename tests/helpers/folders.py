"""Folders of small models, as exporters write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from models.writer import save
from tests.helpers.blocks import FLOAT, INT, Block

WIDTH, LAYERS = 32, range(4)


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def text_encoder(layers: int, words: int = 100) -> Block:
    """A text encoder: token ids to states of 32 numbers."""
    block = Block()
    value = block.op("Gather", block.w("table", words, WIDTH), block.input("input_ids", INT, ["batch", "sequence"]))
    for layer in range(layers):
        with block.scope(f"layers.{layer}"):
            inner = block.op("Relu", block.op("MatMul", value, block.w(f"layers.{layer}.up", WIDTH, 4 * WIDTH)))
            value = block.op("Add", value, block.op("MatMul", inner, block.w(f"layers.{layer}.down", 4 * WIDTH, WIDTH)))
    block.give(value, "last_hidden_state", ["batch", "sequence", WIDTH])
    return block


def denoiser(layers: int) -> Block:
    """A denoiser: latents of 4 channels, and a prompt's states."""
    block = Block()
    sample = block.input("sample", FLOAT, ["batch", 4, "height", "width"])
    states = block.input("encoder_hidden_states", FLOAT, ["batch", "sequence", WIDTH])
    prompt = block.op("Unsqueeze", block.op("ReduceMean", states, axes=[1], keepdims=0), block.ints(2, 3))
    value = block.op("Add", block.op("Conv", sample, block.w("first", WIDTH, 4, 1, 1)), prompt)
    for layer in range(layers):
        with block.scope(f"blocks.{layer}"):
            weight = block.w(f"blocks.{layer}.conv", WIDTH, WIDTH, 3, 3)
            value = block.op("Add", value, block.op("Tanh", block.op("Conv", value, weight, pads=[1, 1, 1, 1])))
    last = block.op("Conv", value, block.w("last", 4, WIDTH, 1, 1))
    block.give(last, "out_sample", ["batch", 4, "height", "width"])
    return block


def image_decoder() -> Block:
    """An image decoder: latents of 4 channels to images."""
    block = Block()
    latent = block.input("latent_sample", FLOAT, ["batch", 4, "latent_height", "latent_width"])
    hidden = block.op("Relu", block.op("Conv", latent, block.w("first", 8, 4, 3, 3), pads=[1, 1, 1, 1]))
    block.give(block.op("Conv", hidden, block.w("last", 3, 8, 1, 1)), "sample", ["batch", 3, "h", "w"])
    return block


def diffusers_folder(folder: Path, text_layers: int = 1, unet_layers: int = 4) -> Path:
    """A Stable Diffusion as diffusers and optimum write it, with PyTorch weights beside one of its models."""
    for name, block in (
        ("text_encoder", text_encoder(text_layers)),
        ("unet", denoiser(unet_layers)),
        ("vae_decoder", image_decoder()),
    ):
        save(block.model(), folder / name / "model.onnx")
    write_json(folder / "model_index.json", {"_class_name": "StableDiffusionPipeline"})
    write_json(folder / "text_encoder" / "config.json", {"max_position_embeddings": 77})
    write_json(folder / "tokenizer" / "tokenizer_config.json", {"model_max_length": 12})
    write_json(folder / "unet" / "config.json", {"sample_size": 8, "in_channels": 4, "cross_attention_dim": WIDTH})
    vae = {"sample_size": 16, "in_channels": 3, "latent_channels": 4, "block_out_channels": [8, 8]}
    write_json(folder / "vae_decoder" / "config.json", vae)
    (folder / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(b"the same weights")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "hidden.json").touch()
    return folder


def diffusers_feeds() -> dict[str, dict[str, Any]]:
    """Feeds for the modules of such a folder."""
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return generator.standard_normal(shape).astype(np.float32)

    return {
        "text_encoder": {"input_ids": generator.integers(0, 100, (1, 12))},
        "unet": {"sample": normal(1, 4, 8, 8), "encoder_hidden_states": normal(1, 12, WIDTH)},
        "vae_decoder": {"latent_sample": normal(1, 4, 8, 8)},
    }


def write_decoders(folder: Path, switch: str = "use_past") -> None:
    """A decoder in optimum's three forms, with the same weights: without a past, with one, and both in one file's If.

    The condition of the If is the input `switch`.
    """
    steps = [f"m{n} = MatMul (h{n}, W{n}) r{n} = Relu (m{n}) h{n + 1} = Add (h{n}, r{n})" for n in LAYERS]
    plain, past = (f"h0 = {first} {' '.join(steps)}" for first in ("Identity (x)", "Sub (past, x)"))
    x, y = "float[n, 32] x", f"y = Identity (h{len(LAYERS)})"
    _save(folder / "decoder_model.onnx", x, f"{plain} {y}")
    _save(folder / "decoder_with_past_model.onnx", f"{x}, float[n, 32] past", f"{past} {y}")
    branches = [
        f"{name} = {name} () => (float[n, 32] out) {{ {body} out = Identity (h{len(LAYERS)}) }}"
        for name, body in (("then_branch", past), ("else_branch", plain))
    ]
    inputs = f"{x}, float[n, 32] past, bool[1] {switch}"
    _save(folder / "decoder_model_merged.onnx", inputs, f"y = If ({switch}) <{', '.join(branches)}>")


def _save(path: Path, inputs: str, body: str) -> None:
    weights = [f"W{n}" for n in LAYERS]
    declared = ", ".join([inputs, *(f"float[32, 32] {name}" for name in weights)])
    text = f'<ir_version: 8, opset_import: ["" : 17]> main ({declared}) => (float[n, 32] y) {{ {body} }}'
    model = ir.from_onnx_text(text)
    for value in [value for value in model.graph.inputs if value.name in weights]:
        model.graph.inputs.remove(value)
        value.const_value = ir.tensor(Block().random(value.name or "", 32, 32))
        model.graph.register_initializer(value)
    save(model, path)
