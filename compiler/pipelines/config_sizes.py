"""Sizes of inputs from the configs beside the models, for inputs without options.

A rule is general: it reads sizes that a config states, and finds the axes that they belong to by the sizes next to
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from splitc.compiler.pipelines.folder import Dimension, FolderModule, ModelFolder
from splitc.compiler.pipelines.names import ALIASES, read_genai_section
from splitc.runtime.files.written import read_config

Config = Mapping[str, Any]
Dimensions = Sequence[Dimension]
# A rule returns the sizes of an input's axes, None for those that it does not know; empty if it knows none.
Rule = Callable[[Config, Dimensions], Sequence[int | None]]


def find_sizes(folder: ModelFolder, module: FolderModule) -> dict[str, Sequence[int | None]]:
    """The sizes of a module's inputs that configs state; None for an axis that they do not mention."""
    sizes_of: dict[str, Sequence[int | None]] = {}
    for config, rule in _rules(folder, module):
        for name, dims in module.facts.inputs.items():
            if sizes := rule(config, dims):
                sizes_of.setdefault(name, sizes)
    return sizes_of


def _rules(folder: ModelFolder, module: FolderModule) -> Iterator[tuple[Config, Rule]]:
    """The rules for a module, with their configs."""
    place = module.facts.path.parent
    config = _config(place / "config.json")
    for part in (config, *(section for section in config.values() if isinstance(section, dict))):
        yield part, _image_sizes
    yield read_genai_section(folder.path, folder.source(module)), _cache_sizes
    yield config, _latent_sizes
    yield config, _sound_sizes
    if (folder.path / "model_index.json").is_file():
        encoders = [name for name in ALIASES["te"] if name in folder.names]
        lengths = {name: _prompt_length(folder.path, name) for name in encoders}
        if module.name in encoders:
            yield {"length": lengths[module.name]}, _ids_sizes
        else:
            longest = max((length for length in lengths.values() if length), default=None)
            yield {**config, "length": longest}, _prompt_sizes


def _config(path: Path) -> Config:
    return read_config(path) if path.is_file() else {}


def _number(config: Config, name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _pair(config: Config, name: str) -> tuple[int, int] | None:
    """A size of two axes, which may be a single number for both."""
    value = config.get(name)
    if isinstance(value, list) and len(value) == 2 and all(isinstance(size, int) and size > 0 for size in value):
        return value[0], value[1]
    return None if (number := _number(config, name)) is None else (number, number)


def _image_sizes(config: Config, dims: Dimensions) -> Sequence[int | None]:
    """Images, or the latents of a denoiser: planes of `sample_size`, or of `image_size` in transformers' configs."""
    for size_name, channels_name in (("sample_size", "in_channels"), ("image_size", "num_channels")):
        size, channels = _pair(config, size_name), _number(config, channels_name)
        if size and channels and len(dims) == 4 and dims[1] == channels:
            return (None, None, *size)
    # Exporters of transformers' models name all sizes of an image by symbols.
    is_open = len(dims) == 4 and not any(isinstance(size, int) for size in dims)
    return (None, channels, *size) if is_open and size and channels else ()


def _cache_sizes(config: Config, dims: Dimensions) -> Sequence[int | None]:
    """Caches by onnxruntime-genai's config: `num_key_value_heads` times `head_size` numbers per token."""
    heads, width = _number(config, "num_key_value_heads"), _number(config, "head_size")
    if not heads or not width or len(dims) != 4 or (dims[1], dims[3]) == (heads, width):
        return ()
    return (None, heads, None, width) if dims[1] == heads or dims[3] == width else ()


def _latent_sizes(config: Config, dims: Dimensions) -> Sequence[int | None]:
    """Latents of an autoencoder: `sample_size`, halved by each of its blocks except the last."""
    size, channels, blocks = (
        _pair(config, "sample_size"),
        _number(config, "latent_channels"),
        config.get("block_out_channels"),
    )
    if not size or len(dims) != 4 or not channels or dims[1] != channels or not isinstance(blocks, list):
        return ()
    return (None, None, *(side >> (len(blocks) - 1) for side in size))


def _sound_sizes(config: Config, dims: Dimensions) -> Sequence[int | None]:
    """A speech encoder's features, whose positions it halves, and its hidden states as a decoder's input."""
    bins, positions, width = (_number(config, name) for name in ("num_mel_bins", "max_source_positions", "d_model"))
    if not bins or not positions or len(dims) != 3:
        return ()
    return (None, bins, 2 * positions) if dims[1] == bins else (None, positions) if dims[2] == width else ()


def _prompt_length(folder: Path, encoder: str) -> int | None:
    """The length to which diffusers' pipelines pad a prompt: its tokenizer's, or else the encoder's positions."""
    tokenizer = _config(folder / encoder.replace("text_encoder", "tokenizer") / "tokenizer_config.json")
    length = _number(tokenizer, "model_max_length")
    # Tokenizers without a limit have a number of 30 digits.
    return (
        length
        if length and length < 1 << 20
        else _number(_config(folder / encoder / "config.json"), "max_position_embeddings")
    )


def _ids_sizes(config: Config, dims: Dimensions) -> Sequence[int | None]:
    """A prompt's token ids, and its mask."""
    return (None, config["length"]) if len(dims) == 2 else ()


def _prompt_sizes(config: Config, dims: Dimensions) -> Sequence[int | None]:
    """A text encoder's output for a prompt, as a denoiser's input."""
    widths = {_number(config, name) for name in ("cross_attention_dim", "joint_attention_dim")} - {None}
    return (None, config["length"]) if len(dims) == 3 and dims[2] in widths else ()
