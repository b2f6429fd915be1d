"""Adapters as a user names them: `style.safetensors:0.8`, or of a file for several models `unet=style.safetensors`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from splitc.runtime.adapters.adapter import Adapter, LowRank
from splitc.runtime.adapters.adapter_files import read_adapter
from splitc.runtime.errors import AdapterError

# What stands before modules' names in files for several models, and the folder of the model that it is for.
PARTS = {
    **{name: name for name in ("unet", "transformer", "text_encoder", "text_encoder_2", "text_encoder_3")},
    **{"lora_unet": "unet", "lora_transformer": "transformer"},
    **{"lora_te": "text_encoder", "lora_te1": "text_encoder", "lora_te2": "text_encoder_2"},
}


def parse_adapters(texts: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """The files, or folders, with how strong each is: 1 unless a number stands behind a colon.

    What exists is a file's name as it stands. Raises AdapterError for a number that is none.
    """
    return tuple((text, 1.0) if _exists(text) or _exists(text.partition("=")[2]) else _parse(text) for text in texts)


def as_pairs(files: str | Iterable[str | tuple[str, float]]) -> list[tuple[str, float]]:
    """Files of adapters, each with how strong it is; text is read as on the command line. Raises as parse_adapters."""
    listed = [files] if isinstance(files, str) else files
    return [pair for file in listed for pair in (parse_adapters([file]) if isinstance(file, str) else [file])]


def read_names(text: str) -> dict[str, float] | None:
    """The adapters that a client's request names, as in `style` or `style:0.8,pose:0.3`; None if it names none.

    Raises AdapterError for a number that is none.
    """
    return summed(_parse(part.strip()) for part in text.split(",")) if text else None


def _parse(text: str) -> tuple[str, float]:
    match = re.fullmatch(r"(.+):([-+]?[0-9]*\.?[0-9]+(?:e[-+]?[0-9]+)?)", text)
    path, strength = (match[1], float(match[2])) if match else (text, 1.0)
    if not math.isfinite(strength):
        raise AdapterError(f"{text}: an adapter's strength is a number, as in {path}:0.8")
    return path, strength


def _exists(path: str) -> bool:
    return bool(path) and Path(path).exists()


def summed(asked: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The total factor of each adapter, which may be named several times."""
    sums: dict[str, float] = {}
    for name, times in asked:
        sums[name] = sums.get(name, 0.0) + times
    return sums


def split_part(text: str) -> tuple[str | None, str]:
    """The model's name before a file, None if there is none, and the file. What exists is a file as it stands."""
    part, equals, path = text.partition("=")
    return (part, path) if equals and re.fullmatch(r"\w+", part) and not _exists(text) else (None, text)


def open_adapter(text: str) -> Adapter:
    """The adapter of a file or folder. With a model's name before it, as in `unet=FILE`, its part for this model.

    What exists is a file's name as it stands. Raises AdapterError as `read_adapter`, and for a file that has only other
    parts.
    """
    part, path = split_part(text)
    if part is None:
        return read_adapter(path)
    adapter = read_adapter(path)
    parts = divide(adapter)
    known = sorted(name for name in parts if name is not None)
    if known and part not in known:
        raise AdapterError(f"{path} has nothing for {part}: it is for {', '.join(known)}")
    return Adapter(text, parts[part if known else None].updates)


def divide(adapter: Adapter) -> dict[str | None, Adapter]:
    """The parts of an adapter for several models, by the names of these. None is the part whose modules name none."""
    parts: dict[str | None, dict[str, LowRank]] = {}
    for module, update in adapter.updates.items():
        parts.setdefault(_part_of(module), {})[module] = update
    return {name: Adapter(adapter.name, updates) for name, updates in parts.items()}


def by_module(
    asked: str | Iterable[str | tuple[str, float]], names: Sequence[str]
) -> dict[str, list[tuple[str, float]]]:
    """The adapters of each of a package's modules, whose name stands before the file.

    Raises AdapterError for a file with no such name.
    """
    own: dict[str, list[tuple[str, float]]] = {name: [] for name in names}
    for text, strength in as_pairs(asked):
        module = text.partition("=")[0]
        if module not in own:
            raise AdapterError(
                f"{text}: say which module the adapter is for, as in {names[0]}=FILE: {', '.join(names)}"
            )
        own[module].append((text, strength))
    return own


def _part_of(module: str) -> str | None:
    """The model that a module's name begins with; None if it names none."""
    before = re.match(r"(lora_[a-z]+\d?)_|(\w+)\.", module)
    return None if before is None else PARTS.get(before[1] or before[2])
