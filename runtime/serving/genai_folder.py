"""Write a folder for onnxruntime-genai: a package's stages, as they are, with a config and a tokenizer."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitc.runtime.errors import MisuseError
from splitc.runtime.files.written import indented, link_file, read_config
from splitc.runtime.generate.capacity import USUAL_CONTEXT, find_capacity
from splitc.runtime.generate.signature import LanguageSignature, find_signature, need_tokens
from splitc.runtime.generate.text import Text
from splitc.runtime.hardware.devices import device_named
from splitc.runtime.package.manifest import EngineFile, Manifest, Rank
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.package.pipeline_file import find_module
from splitc.runtime.package.states import State
from splitc.runtime.serving.served_folders import new_folder
from splitc.runtime.serving.stage_engines import find_stages, write_stage_file
from splitc.runtime.threads.progress import counted


@dataclass(frozen=True)
class CacheNames:
    """Patterns of names, with `%d` for the layer's number, and the sizes of a cache: batch x heads x length x head.

    `inputs` and `outputs` are a layer's keys and values.
    """

    inputs: tuple[str, str]
    outputs: tuple[str, str]
    layers: int
    heads: int
    head: int


def find_caches(manifest: Manifest) -> CacheNames:
    """Find the patterns. Raises MisuseError for a model that has no such caches."""
    if not manifest.states:
        raise MisuseError(f"{manifest.source.name} has no caches, which genai needs")
    patterns = _group(manifest.states)
    layers = len(manifest.states) // 2
    if len(patterns) != 2 or any(layers_named != set(range(layers)) for layers_named in patterns.values()):
        names = ", ".join(sorted(taken for taken, _ in patterns)[:4])
        raise MisuseError(
            f"genai needs two caches per layer, keys and values, whose names differ by the layer's number from 0 on; "
            f"{manifest.source.name} has {len(manifest.states)}: {names}"
        )
    heads, head = _sizes(manifest)
    (first, first_output), (second, second_output) = patterns
    return CacheNames((first, second), (first_output, second_output), layers, heads, head)


def _group(states: Sequence[State]) -> dict[tuple[str, str], set[int]]:
    """The patterns of the states' two names, and their layers. The layer's number is the one that differs."""
    possible = [_patterns(state) for state in states]
    counts = Counter(pattern for patterns in possible for pattern in patterns)
    groups: dict[tuple[str, str], set[int]] = {}
    for state, patterns in zip(states, possible, strict=True):
        if not patterns:
            raise MisuseError(
                f"genai needs the layer's number in the names of a cache: '{state.input}', '{state.output}'"
            )
        pattern = max(patterns, key=counts.__getitem__)
        groups.setdefault(pattern, set()).add(patterns[pattern])
    return groups


def _patterns(state: State) -> dict[tuple[str, str], int]:
    """The names with a gap in place of a common number, and that number."""
    if "%" in state.input + state.output:
        return {}
    return {
        (_with_gap(state.input, taken), _with_gap(state.output, given)): int(taken[0])
        for taken in re.finditer(r"\d+", state.input)
        for given in re.finditer(r"\d+", state.output)
        if taken[0] == given[0]
    }


def _with_gap(name: str, number: re.Match[str]) -> str:
    return f"{name[: number.start()]}%d{name[number.end() :]}"


def _sizes(manifest: Manifest) -> tuple[int, int]:
    """The heads of a cache, and the size of each. Raises MisuseError if caches differ, or are of another form."""
    shapes = {tensor.name: tensor.shape or [] for tensor in manifest.inputs}
    forms = {(len(shape := shapes[state.input]), state.grows, *shape[1::2]) for state in manifest.states}
    axes, grows, *sizes = next(iter(forms))
    match sizes:
        case [int(heads), int(head)] if (len(forms), axes, grows) == (1, 4, 2):
            return heads, head
    raise MisuseError(f"genai needs equal caches, batch x heads x length x head, and {manifest.source.name} has others")


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


FILE_NAME = "genai_config.json"
# Files of a tokenizer and of a model's settings, by their ends. Weights and models have others.
TOKENIZER_ENDS = (".json", ".txt", ".model", ".jinja", ".tiktoken")


def export_genai(
    package: Path,
    folder: Path,
    *,
    module: str | None = None,
    tokenizer: Path | None = None,
    context: int | None = None,
    stop: Sequence[int] = (),
) -> list[Path]:
    """Write the package into a new folder, for genai. Returns the folder.

    The model's own `genai_config.json`, beside the tokenizer or in the package, is copied, with other stages. If there
    is none, one is written, with `context` and the end tokens `stop`, or else the tokenizer's. Raises MisuseError for a
    package that is no decoder in stages, if no end token is known, and for a folder that exists.
    """
    own = find_module(package, module)
    manifest = read_manifest(own)
    if tokenizer is not None and not tokenizer.is_dir():
        raise MisuseError(f"--tokenizer {tokenizer} is not a folder: name the one that has tokenizer.json")
    base = _find_base([folder for folder in (tokenizer, own, package) if folder is not None])
    if base is not None and (stop or context is not None):
        option = "--stop" if stop else "--context"
        raise MisuseError(f"{option} has no effect beside the model's own {FILE_NAME}: change it there")
    endings = list(stop)
    if base is None and not endings and tokenizer is not None:
        endings = Text.load(tokenizer).find_endings()
    config = genai_config(manifest, base, context, endings)
    with new_folder(folder) as made:
        for file in counted("writing files", manifest.files):
            target = made / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            write_stage_file(manifest, own / file.path, target)
        for path in sorted(tokenizer.iterdir()) if tokenizer is not None else ():
            if path.is_file() and path.name.endswith(TOKENIZER_ENDS) and path.name != FILE_NAME:
                link_file(path, made / path.name)
        (made / FILE_NAME).write_bytes(indented(config))
    return [folder]


def _find_base(folders: list[Path]) -> dict[str, Any] | None:
    """The unsplit model's own config, if one of the folders has it."""
    for path in (folder / FILE_NAME for folder in folders):
        if path.exists():
            config = read_config(path)
            model = config.get("model")
            if not isinstance(model, dict) or not isinstance(model.get("decoder"), dict):
                raise MisuseError(f"{path} has no 'decoder' in its 'model', so it is no config of a decoder")
            return config
    return None
