"""Configs that travel with the models of a package: beside a module's model, or in a folder above it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from splitc.runtime.errors import MisuseError
from splitc.runtime.files.written import read_config
from splitc.runtime.package.pipeline_file import read_pipeline

# Where folders have it.
TOKENIZERS = ("tokenizer.json", "tokenizer/tokenizer.json")


def find_beside(package: Path, module: str, name: str) -> Path | None:
    """A file of this name: beside the module's model in the models' folder, or in the nearest folder above."""
    pipeline = read_pipeline(package)
    listed = None if pipeline is None else pipeline.find(module)
    if listed is None:
        return None
    place = (package / listed.source).parent
    while True:
        if (place / name).is_file():
            return place / name
        if place == package:
            return None
        place = place.parent


def find_tokenizer(package: Path, module: str | None) -> Path | None:
    """The tokenizer.json that travels with a module's model; without a name, with any of them. None if none does."""
    pipeline = read_pipeline(package)
    names = [entry.name for entry in pipeline.modules if module in (None, entry.name)] if pipeline else []
    files = (find_beside(package, name, place) for name in names for place in TOKENIZERS)
    return next((file for file in files if file is not None), None)


def read_beside(package: Path, module: str, name: str) -> dict[str, Any]:
    """The JSON object of a file, as `find_beside` finds it; empty if there is none. Raises MisuseError for others."""
    path = find_beside(package, module, name)
    return {} if path is None else read_config(path)


def generation_config(package: Path, module: str) -> dict[str, Any]:
    """A module's generation settings: those of generation_config.json override config.json."""
    model = read_beside(package, module, "config.json")
    stated = read_beside(package, module, "generation_config.json")
    return {**model, **{key: value for key, value in stated.items() if value is not None}}


@contextmanager
def understood(what: str) -> Iterator[None]:
    """Raise MisuseError for unexpected content of a config, which `what` names."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise MisuseError(f"can't understand {what}: {type(error).__name__}: {error}") from error
