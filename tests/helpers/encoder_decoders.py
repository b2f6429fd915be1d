"""Folders of an encoder and a decoder in the forms that optimum writes, and greedy generation with their models."""

from __future__ import annotations

import math
import wave
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from tokenizers import Tokenizer, models, pre_tokenizers

from models.writer import save
from tests.conftest import Array, Arrays, whole_session
from tests.helpers.blocks import FLOAT, INT, Block
from tests.helpers.folders import write_json

VOCABULARY, WIDTH, HEADS, LAYERS = 60, 32, 4, 3
HEAD = WIDTH // HEADS
BINS, RATE, SAMPLES, HOP = 8, 16000, 3200, 160
FRAMES = SAMPLES // HOP
START, END, ENGLISH, GERMAN, TRANSCRIBE, TRANSLATE, PLAIN = 50, 51, 52, 53, 54, 55, 56
EVERY = "encoder_sequence_length"
# Keys and values.
Pair = tuple[ir.Value, ir.Value]


def speech_folder(folder: Path) -> Path:
    """A model like Whisper: sound features as inputs, languages and tasks as tokens, no masks."""
    encoder = Block()
    features = encoder.input("input_features", FLOAT, ["batch_size", BINS, FRAMES])
    heard = encoder.op("Conv", features, encoder.w("conv", WIDTH, BINS, 3), strides=[2], pads=[1, 1])
    louder = encoder.op("Mul", heard, encoder.constant(9.0, np.float32))
    _encode(encoder, encoder.op("Transpose", louder, perm=[0, 2, 1]))
    save(encoder.model(), folder / "encoder_model.onnx")
    _save_decoders(folder, masked=False)
    sound = {"feature_size": BINS, "sampling_rate": RATE, "hop_length": HOP, "n_fft": 400, "n_samples": SAMPLES}
    write_json(folder / "preprocessor_config.json", sound)
    write_json(folder / "config.json", {"max_target_positions": 40})
    generation = {
        **{"decoder_start_token_id": START, "eos_token_id": END, "max_length": 24, "suppress_tokens": [1, 2]},
        **{"begin_suppress_tokens": [3, END], "no_timestamps_token_id": PLAIN, "is_multilingual": True},
        "lang_to_id": {"<|en|>": ENGLISH, "<|de|>": GERMAN},
        "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE},
    }
    write_json(folder / "generation_config.json", generation)
    write_tokenizer(folder)
    return folder


def text_folder(folder: Path) -> Path:
    """A model like T5: a text with its mask, which the decoder reads too."""
    encoder = Block()
    ids = encoder.input("input_ids", INT, ["batch_size", EVERY])
    mask = encoder.input("attention_mask", INT, ["batch_size", EVERY])
    _encode(encoder, encoder.op("Gather", encoder.w("shared", VOCABULARY, WIDTH), ids), mask)
    save(encoder.model(), folder / "encoder_model.onnx")
    _save_decoders(folder, masked=True)
    write_json(folder / "config.json", {"decoder_start_token_id": 0, "eos_token_id": END, "n_positions": 40})
    write_tokenizer(folder)
    return folder


def genai_folder(folder: Path) -> Path:
    """The text folder in onnxruntime-genai's form: the encoder computes the caches of the cross attention."""
    text_folder(folder)
    (folder / "decoder_model.onnx").unlink()
    encoder = Block()
    ids = encoder.input("input_ids", INT, ["batch_size", EVERY])
    mask = encoder.input("attention_mask", INT, ["batch_size", EVERY])
    states = _encode(encoder, encoder.op("Gather", encoder.w("shared", VOCABULARY, WIDTH), ids), mask)
    for layer in range(LAYERS):
        for kind, each in zip(("key", "value"), _keys_values(encoder, states, f"decoder.{layer}.cross")):
            encoder.give(each, f"present.{layer}.encoder.{kind}", ["batch_size", HEADS, EVERY, HEAD])
    save(encoder.model(), folder / "encoder_model.onnx")
    roles = {"encoder": "encoder_model.onnx", "decoder": "decoder_with_past_model.onnx"}
    write_json(folder / "genai_config.json", {"model": {role: {"filename": file} for role, file in roles.items()}})
    return folder


def write_tokenizer(folder: Path) -> None:
    """A word for each token."""
    made = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))


def write_sound(path: Path, seed: int, seconds: float = 0.15, rate: int = RATE) -> Path:
    """A rising tone with noise."""
    time = np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(seed).standard_normal(len(time))
    samples = 0.4 * np.sin(2 * np.pi * (300 * seed + 4000 * time) * time) + 0.1 * noise
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return path


def _save_decoders(folder: Path, masked: bool) -> None:
    save(_decoder(masked, past=False), folder / "decoder_model.onnx")
    save(_decoder(masked, past=True), folder / "decoder_with_past_model.onnx")


def _encode(block: Block, value: ir.Value, mask: ir.Value | None = None) -> ir.Value:
    bias = None if mask is None else _bias(block, mask)
    for layer in range(2):
        with block.scope(f"encoder.{layer}"):
            keys, values = _keys_values(block, value, f"encoder.{layer}")
            value = _attend(block, value, keys, values, bias, f"encoder.{layer}")
            value = _feed_forward(block, value, f"encoder.{layer}")
    block.give(value, "last_hidden_state", ["batch_size", EVERY, WIDTH])
    return value


def _decoder(masked: bool, past: bool) -> ir.Model:
    """A decoder that makes the caches, or, with `past`, one that takes them and one new token."""
    block, new = Block(), "decoder_sequence_length"
    bias = _bias(block, block.input("encoder_attention_mask", INT, ["batch_size", EVERY])) if masked else None
    ids = block.input("input_ids", INT, ["batch_size", new])
    states = None if past else block.input("encoder_hidden_states", FLOAT, ["batch_size", EVERY, WIDTH])
    causal = None if past else _causal(block, ids)
    value = block.op("Gather", block.w("shared", VOCABULARY, WIDTH), ids)
    made: list[tuple[str, ir.Value, str]] = []
    for layer in range(LAYERS):
        with block.scope(f"decoder.{layer}"):
            name = f"decoder.{layer}"
            own = _keys_values(block, value, f"{name}.self")
            if past:
                before = _caches(block, f"past_key_values.{layer}.decoder", "past")
                own = (block.op("Concat", before[0], own[0], axis=2), block.op("Concat", before[1], own[1], axis=2))
            made += [(f"{layer}.decoder.{kind}", each, "total") for kind, each in zip(("key", "value"), own)]
            value = _attend(block, value, *own, causal, f"{name}.self")
            if states is not None:
                cross = _keys_values(block, states, f"{name}.cross")
                made += [(f"{layer}.encoder.{kind}", each, EVERY) for kind, each in zip(("key", "value"), cross)]
            else:
                cross = _caches(block, f"past_key_values.{layer}.encoder", EVERY)
            value = _attend(block, value, *cross, bias, f"{name}.cross")
            value = _feed_forward(block, value, name)
    block.give(block.op("MatMul", value, block.w("head", WIDTH, VOCABULARY)), "logits", ["batch_size", new, VOCABULARY])
    for name, each, length in made:
        block.give(each, f"present.{name}", ["batch_size", HEADS, length, HEAD])
    return block.model()


def _caches(block: Block, name: str, length: str) -> Pair:
    shape: list[int | str] = ["batch_size", HEADS, length, HEAD]
    return block.input(f"{name}.key", FLOAT, shape), block.input(f"{name}.value", FLOAT, shape)


def _heads(block: Block, value: ir.Value, weight: str) -> ir.Value:
    """Products with a weight, [batch, heads, positions, head]."""
    made = block.op("MatMul", value, block.w(weight, WIDTH, WIDTH))
    return block.op("Transpose", block.op("Reshape", made, block.ints(0, -1, HEADS, HEAD)), perm=[0, 2, 1, 3])


def _keys_values(block: Block, value: ir.Value, name: str) -> Pair:
    return _heads(block, value, f"{name}.key"), _heads(block, value, f"{name}.value")


def _attend(
    block: Block, value: ir.Value, keys: ir.Value, values: ir.Value, bias: ir.Value | None, name: str
) -> ir.Value:
    queries = _heads(block, block.op("LayerNormalization", value, block.w(f"{name}.norm", WIDTH)), f"{name}.query")
    scores = block.op("MatMul", queries, block.op("Transpose", keys, perm=[0, 1, 3, 2]))
    scores = block.op("Mul", scores, block.constant(4 / math.sqrt(HEAD), np.float32))
    chances = block.op("Softmax", scores if bias is None else block.op("Add", scores, bias), axis=-1)
    mixed = block.op("Transpose", block.op("MatMul", chances, values), perm=[0, 2, 1, 3])
    mixed = block.op("Reshape", mixed, block.ints(0, -1, WIDTH))
    return block.op("Add", value, block.op("MatMul", mixed, block.w(f"{name}.out", WIDTH, WIDTH)))


def _feed_forward(block: Block, value: ir.Value, name: str) -> ir.Value:
    inner = block.op("Relu", block.op("MatMul", value, block.w(f"{name}.up", WIDTH, 2 * WIDTH)))
    added = block.op("Add", value, block.op("MatMul", inner, block.w(f"{name}.down", 2 * WIDTH, WIDTH)))
    return block.op("LayerNormalization", added, block.w(f"{name}.last", WIDTH))


def _bias(block: Block, mask: ir.Value) -> ir.Value:
    """An attention bias: far below 0 where the mask is 0."""
    off = block.op("Sub", block.constant(1.0, np.float32), block.op("Cast", mask, to=FLOAT))
    return block.op("Unsqueeze", block.op("Mul", off, block.constant(-1e9, np.float32)), block.ints(1, 2))


def _causal(block: Block, ids: ir.Value) -> ir.Value:
    sizes = block.op("Concat", block.shape(ids, 1), block.shape(ids, 1), axis=0)
    low = block.op("ConstantOfShape", sizes, value=ir.tensor(np.array([-1e9], np.float32)))
    return block.op("Trilu", low, block.constant(1, np.int64), upper=1)


def plain_tokens(folder: Path, feeds: Arrays, prompt: Sequence[int], most: int, rules: bool = False) -> list[int]:
    """The likeliest tokens by the unsplit models in ONNX Runtime, up to END. `rules` are those of the speech folder."""
    names = ("encoder_model", "decoder_model", "decoder_with_past_model")
    encoder, first, step = (whole_session(folder / f"{name}.onnx") for name in names)
    states = encoder.run(None, feeds)[0]
    mask = {"encoder_attention_mask": feeds["attention_mask"]} if "attention_mask" in feeds else {}
    given = {"input_ids": np.array([prompt]), "encoder_hidden_states": states, **mask}
    outputs = _run(first, given)
    caches = {name.replace("present", "past_key_values"): each for name, each in outputs.items() if name != "logits"}
    tokens: list[int] = []
    while len(tokens) < most:
        token = _choose(outputs["logits"][0, -1], {1, 2, *(() if tokens else (3, END))} if rules else ())
        if token == END:
            break
        tokens.append(token)
        outputs = _run(step, {"input_ids": np.array([[token]]), **mask, **caches})
        caches.update(
            {name.replace("present", "past_key_values"): each for name, each in outputs.items() if name != "logits"}
        )
    return tokens


def _run(session: ort.InferenceSession, feeds: Arrays) -> Arrays:
    return dict(zip([each.name for each in session.get_outputs()], session.run(None, feeds)))


def _choose(logits: Array, banned: Collection[int]) -> int:
    return int(np.argmax([-math.inf if token in banned else logit for token, logit in enumerate(logits)]))
