"""Write a folder for onnxruntime-genai: a package's stages, as they are, with a config and a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from splitc.runtime.errors import MisuseError
from splitc.runtime.files.written import indented, link_file, read_config
from splitc.runtime.generate.text import Text
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.package.pipeline_file import find_module
from splitc.runtime.serving.genai_config import genai_config
from splitc.runtime.serving.served_folders import new_folder
from splitc.runtime.serving.stage_engines import write_stage_file
from splitc.runtime.threads.progress import counted

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
