"""The `genai_config.json` of a package: its stages as onnxruntime-genai's decoder pipeline."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from splitc.runtime.errors import MisuseError
from splitc.runtime.generate.capacity import USUAL_CONTEXT, find_capacity
from splitc.runtime.generate.signature import LanguageSignature, find_signature, need_tokens
from splitc.runtime.hardware.devices import device_named
from splitc.runtime.package.manifest import EngineFile, Manifest, Rank
from splitc.runtime.serving.cache_names import find_caches
from splitc.runtime.serving.stage_engines import find_stages

TYPE = "decoder-pipeline"


def genai_config(
    manifest: Manifest, base: Mapping[str, Any] | None, context: int | None, endings: Sequence[int]
) -> dict[str, Any]:
    """The config. In `base`, the unsplit model's own, only the model is replaced, by the stages.

    `context` is the most tokens in a sequence, by default what the package knows; `endings` are the tokens that end a
    text. Raises MisuseError for a package whose ranks are no stages of a decoder, or are not ONNX Runtime's.
    """
    engines = find_stages(manifest, "genai")
    stages = [
        _stage(number, *rank_engine) for number, rank_engine in enumerate(zip(manifest.ranks, engines, strict=True))
    ]
    if base is not None:
        config = copy.deepcopy(dict(base))
    else:
        config = _new_config(manifest, find_signature(manifest), context, endings)
    config["model"]["type"] = TYPE
    config["model"]["decoder"].pop("filename", None)
    config["model"]["decoder"]["pipeline"] = stages
    return config


def _stage(number: int, rank: Rank, engine: EngineFile) -> dict[str, Any]:
    """The config of a rank as a model of the pipeline."""
    stage: dict[str, Any] = {"filename": engine.path, "inputs": engine.inputs, "outputs": engine.outputs}
    device = device_named(rank.device)
    if device.kind == "cuda":
        stage["session_options"] = {"provider_options": [{"cuda": {"device_id": str(device.index)}}]}
    return {f"stage{number}": stage}


def _new_config(
    manifest: Manifest, signature: LanguageSignature, context: int | None, endings: Sequence[int]
) -> dict[str, Any]:
    if not endings:
        raise MisuseError("genai needs the token that ends a text: name it with --stop, or give a --tokenizer")
    caches = find_caches(manifest)
    logits = next(tensor for tensor in manifest.outputs if tensor.name == signature.logits)
    vocabulary = None if logits.shape is None else logits.shape[-1]
    if not isinstance(vocabulary, int):
        raise MisuseError(f"the output '{logits.name}' has no fixed number of tokens, which genai needs")
    need_tokens(manifest, signature.logits, endings)
    capacity = find_capacity(manifest, signature)
    if context is not None and capacity is not None and context > capacity:
        raise MisuseError(f"--context {context}: the model has room for {capacity} tokens")
    longest = context or capacity or USUAL_CONTEXT
    named = {"input_ids": signature.ids, "attention_mask": signature.mask, "position_ids": signature.positions}
    return {
        "model": {
            "eos_token_id": list(endings),
            "pad_token_id": endings[0],
            "context_length": longest,
            "vocab_size": vocabulary,
            "decoder": {
                "head_size": caches.head,
                "num_hidden_layers": caches.layers,
                "num_key_value_heads": caches.heads,
                "inputs": {
                    **{key: name for key, name in named.items() if name is not None},
                    **dict(zip(("past_key_names", "past_value_names"), caches.inputs, strict=True)),
                },
                "outputs": {
                    "logits": signature.logits,
                    **dict(zip(("present_key_names", "present_value_names"), caches.outputs, strict=True)),
                },
            },
        },
        "search": {"max_length": longest, "do_sample": False, "past_present_share_buffer": False},
    }
