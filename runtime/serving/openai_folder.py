"""Write a model for MLServer that answers OpenAI's requests: a package of a decoder, and its tokenizer."""

from __future__ import annotations

from pathlib import Path

import msgspec

from splitc.runtime.errors import MisuseError
from splitc.runtime.files.written import link_file
from splitc.runtime.generate.package_configs import find_beside, find_tokenizer
from splitc.runtime.generate.signature import find_signature
from splitc.runtime.generate.text import Text
from splitc.runtime.package.pipeline_file import read_pipeline
from splitc.runtime.serving.mlserver_folder import write_model, write_settings
from splitc.runtime.serving.served_folders import find_models, new_models
from splitc.runtime.serving.serving_file import Serving

MODEL = "splitc.runtime.serving.openai_model.OpenAIModel"
TOKENIZER = "tokenizer"
# What is read of a tokenizer's folder, and of the model's configs.
FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json"),
)
CONFIGS = ("generation_config.json", "config.json", "genai_config.json")


def export_openai(
    package: Path,
    folder: Path,
    serving: Serving,
    *,
    module: str | None = None,
    name: str | None = None,
    tokenizer: Path | None = None,
    context: int | None = None,
) -> list[Path]:
    """Write a model for the package into the folder. Returns the model's folder.

    Without a `tokenizer`, the one in the package is used. Raises MisuseError as `export_mlserver` does, for a package
    of several models, for one that is no language model, and if there is no tokenizer.
    """
    model, *others = find_models(package, module, name)
    if others:
        names = ", ".join(one.name for one in (model, *others))
        raise MisuseError(f"{package} has {1 + len(others)} models ({names}): name the decoder by --module")
    find_signature(model.manifest)
    files = _find_files(package, module, tokenizer)
    with new_models(folder, [model.name]) as (own,):
        chosen = msgspec.structs.replace(serving, sequences=False, tokenizer=TOKENIZER, context=context)
        write_model(own, model, chosen, MODEL)
        (own / TOKENIZER).mkdir()
        for file in files.values():
            link_file(file, own / TOKENIZER / file.name)
        Text.load(own / TOKENIZER)
    write_settings(folder)
    return [folder / model.name]


def _find_files(package: Path, module: str | None, tokenizer: Path | None) -> dict[str, Path]:
    """The files of the tokenizer, and the configs beside it or else beside the model."""
    file = find_tokenizer(package, module) if tokenizer is None else tokenizer
    if file is None:
        raise MisuseError(f"no tokenizer.json travels with {package}: name its folder by --tokenizer")
    beside = file if file.is_dir() else file.parent
    if not (beside / FILES[0]).is_file():
        raise MisuseError(f"--tokenizer {file} has no {FILES[0]}")
    files = {name: beside / name for name in (*FILES, *CONFIGS) if (beside / name).is_file()}
    pipeline = read_pipeline(package)
    if tokenizer is None and pipeline is not None:
        model = module or pipeline.modules[0].name
        others = {config: find_beside(package, model, config) for config in CONFIGS}
        files = {name: path for name, path in others.items() if path is not None} | files
    return files
