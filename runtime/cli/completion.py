"""Shell completion: values of options and arguments that can be found quickly.

Nothing here opens a model or loads an engine's library, since a user waits for it. Unreadable files have no
completions. Where there are none, the shell completes file names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from splitc.runtime.feeds.fills import FILLS
from splitc.runtime.generate.package_configs import generation_config
from splitc.runtime.hardware.devices import cores
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.package.manifest_file import FILE_NAME as MANIFEST
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.package.pipeline_file import FILE_NAME as PIPELINE
from splitc.runtime.package.pipeline_file import find_module, read_pipeline

# A value, or a value with its description.
Value = str | tuple[str, str]
# Typer passes what a function has parameters for: the context, and the text typed so far.
Completer = Callable[..., list[Value]]
# The most CPU devices that are listed, since there is no limit. A choice.
MOST = 8


def one_of(known: Iterable[str] | Mapping[str, str]) -> Completer:
    """Complete one of these values, or of these values with their descriptions."""
    values: list[Value] = [*known.items()] if isinstance(known, Mapping) else [*known]

    def complete() -> list[Value]:
        return values

    return complete


def read_by(find: Callable[[Mapping[str, Any], str], Iterable[str]]) -> Completer:
    """Complete values that `find` reads from files, given the parameters so far and the typed part of this one."""

    def complete(ctx: typer.Context, incomplete: str) -> list[Value]:
        try:
            return [_typed(value) for value in find(_given(ctx), incomplete)]
        except Exception:  # a user who is typing a command is not told
            return []

    return complete


def _given(ctx: typer.Context) -> dict[str, Any]:
    """A command's parameters so far. Before an option's value, click has not parsed the arguments yet."""
    names = [parameter.name for parameter in ctx.command.params if parameter.param_type_name == "argument"]
    left = {str(name): value for name, value in zip(names, ctx.args, strict=False)}
    return {**left, **{name: value for name, value in ctx.params.items() if value is not None}}


def _typed(value: str) -> str:
    """A value as the shell inserts it. Bash needs it escaped; other shells escape it themselves."""
    if os.environ.get("_SPLITC_COMPLETE") != "complete_bash":
        return value
    words, place = os.environ.get("COMP_WORDS", "").split("\n"), int(os.environ.get("COMP_CWORD", "0"))
    is_quoted = place < len(words) and words[place].startswith(('"', "'"))
    return value if is_quoted else re.sub(r"([^\w./~+,@%=:#-])", r"\\\1", value)


def _devices(given: Mapping[str, Any], incomplete: str) -> Iterator[str]:
    """The devices of this machine, also after `cpu0&`, `unet=` and `host1/`."""
    done = re.fullmatch(r"((?:.*[&,=])?(?:host[0-9]+/)?).*", incomplete)
    before = done[1] if done else ""
    kinds = {"cpu": min(cores(), MOST), "cuda": _count_gpus()}
    yield from (f"{before}{kind}{number}" for kind, count in kinds.items() for number in range(count))
    yield from (f"{before}{count}x{kind}" for kind, count in kinds.items() if count > 1)


def _count_gpus() -> int:
    """The GPUs that Linux has device files for. CUDA would be exact, but takes long to start."""
    files = sum(re.fullmatch("nvidia[0-9]+", path.name) is not None for path in Path("/dev").glob("nvidia*"))
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return files if seen is None else min(files, len([gpu for gpu in seen.split(",") if gpu not in ("", "-1")]))


def _models(given: Mapping[str, Any], incomplete: str) -> Iterator[str]:
    """ONNX files."""
    return (text for text, path in _paths(incomplete) if path.suffix.lower() == ".onnx")


def _packages(given: Mapping[str, Any], incomplete: str) -> Iterator[str]:
    """Folders that are packages."""
    return (text for text, path in _paths(incomplete) if any((path / name).is_file() for name in (MANIFEST, PIPELINE)))


def _paths(incomplete: str) -> Iterator[tuple[str, Path]]:
    """The contents of the folder whose path is typed, as the user would type them."""
    before = incomplete[: incomplete.rfind("/") + 1]
    for path in sorted(Path(before or ".").expanduser().iterdir()):
        yield f"{before}{path.name}", path


def _modules(given: Mapping[str, Any], incomplete: str) -> Sequence[str]:
    """The models of a package."""
    pipeline = read_pipeline(Path(given["package"]))
    return [] if pipeline is None else [module.name for module in pipeline.modules]


def _manifest(given: Mapping[str, Any]) -> Manifest:
    return read_manifest(find_module(Path(given["package"]), given.get("module")))


def _ranks(given: Mapping[str, Any], incomplete: str) -> Iterable[str]:
    """The numbers of a package's ranks."""
    return map(str, range(len(_manifest(given).devices)))


def _fills(given: Mapping[str, Any], incomplete: str) -> Iterator[str]:
    """A package's inputs, or, behind an input's name, the ways to make it up."""
    named = [
        tensor.name for tensor in _manifest(given).inputs if f"{tensor.name}=".startswith(incomplete.partition("=")[0])
    ]
    return (f"{name}={how}" for name in named for how in (FILLS if len(named) == 1 else ("",)))


def _settings(given: Mapping[str, Any], incomplete: str) -> Iterator[str]:
    """The bound inputs of a package, which are true or false."""
    switches = (tensor.name for tensor in _manifest(given).fixed if tensor.dtype == "bool")
    return (f"{name}={value}" for name in switches for value in ("true", "false"))


def _spoken(given: Mapping[str, Any], incomplete: str) -> Iterator[str]:
    """The languages that a package's configs name."""
    for module in _modules(given, incomplete):
        known = generation_config(Path(given["package"]), module).get("lang_to_id", ())
        yield from (language.strip("<|>") for language in known)


devices, models, packages, modules = read_by(_devices), read_by(_models), read_by(_packages), read_by(_modules)
ranks, fills, settings, languages = map(read_by, (_ranks, _fills, _settings, _spoken))
