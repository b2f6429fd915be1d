"""The names of a folder's models: from their paths, from genai_config.json, and the aliases that users know for some.

No model is opened.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from splitc.compiler.errors import ModelError
from splitc.runtime.errors import MisuseError
from splitc.runtime.files.written import read_config
from splitc.runtime.package.manifest_file import FILE_NAME as MANIFEST
from splitc.runtime.package.pipeline_file import FILE_NAME as PIPELINE

GENAI = "genai_config.json"
# stable-diffusion.cpp's names, for the modules of folders that diffusers and optimum write.
ALIASES = {
    "te": ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4"),
    "diffusion": ("unet", "transformer", "transformer_2"),
    "vae": ("vae_encoder", "vae_decoder"),
    "clip_vision": ("image_encoder",),
}
# optimum's names of the two uses of a decoder with a switch: without a cache, and with one.
USES = {"decoder_model_merged": ("decoder_model", "decoder_with_past_model")}


def module_names(paths: Collection[PurePosixPath]) -> dict[PurePosixPath, str]:
    """The names of models, by their paths in a folder.

    A model has the name of its subfolder if it is alone there or is called `model`; else its own, without the suffix.
    If several have one name, parent folders are prepended, as in `first_onnx` and `second_onnx`.
    """
    beside = Counter(path.parent for path in paths)
    parts = {}
    for path in paths:
        takes_folders = len(path.parts) > 1 and (beside[path.parent] == 1 or path.stem == "model")
        parts[path] = path.parent.parts if takes_folders else (*path.parent.parts, path.stem)
    taken = dict.fromkeys(paths, 1)
    while True:
        names = {path: "_".join(parts[path][-count:]) for path, count in taken.items()}
        count = Counter(names.values())
        longer = [path for path in paths if count[names[path]] > 1 and taken[path] < len(parts[path])]
        if not longer:
            return names
        taken.update((path, taken[path] + 1) for path in longer)


def names_of_uses(name: str) -> tuple[str, str]:
    """The names of the two uses of a model with a switch: for false, and for true."""
    return USES.get(name, (f"{name}_false", f"{name}_true"))


def find_modules(name: str, modules: Collection[str]) -> list[str]:
    """The modules that a name means: itself, or the existing ones of an alias. Empty if there are none."""
    return [name] if name in modules else [module for module in ALIASES.get(name, ()) if module in modules]


def need_modules(name: str, modules: Sequence[str], option: str) -> list[str]:
    """As `find_modules`. Raises MisuseError, which names the option and the existing modules, if there are none."""
    if meant := find_modules(name, modules):
        return meant
    short = [f"{alias} ({', '.join(meant)})" for alias in ALIASES if (meant := find_modules(alias, modules))]
    names = ", ".join(modules) + (f"; and in short {', '.join(short)}" if short else "")
    raise MisuseError(f"{option} names the module '{name}', which is not there: there are {names}")


def files_of_folder(folder: Path) -> Iterator[PurePosixPath]:
    """The files of a folder and its subfolders, as paths relative to it, without hidden files and splitc's packages.

    Links to folders elsewhere are followed, once, if there are models.
    """
    roots = [folder.resolve()]
    for place, folders, names in os.walk(folder, followlinks=True):
        kept = [Path(place, name) for name in sorted(folders) if not name.startswith(".")]
        folders[:] = [path.name for path in kept if not is_package(path) and _is_followed(path, roots)]
        for name in sorted(file for file in names if not file.startswith(".")):
            yield PurePosixPath(Path(place, name).relative_to(folder).as_posix())


def _is_followed(path: Path, roots: list[Path]) -> bool:
    """Whether a folder is no link, or one with models that are not in or around the `roots`, to which it is added."""
    if not path.is_symlink():
        return True
    target = path.resolve()
    if any(root in (target, *target.parents) or target in root.parents for root in roots):
        return False
    roots.append(target)
    return any(target.rglob("*.onnx"))


def is_package(folder: Path) -> bool:
    """Whether a folder is a package of `splitc compile`: its engines are ONNX files too."""
    return (folder / PIPELINE).is_file() or ((folder / MANIFEST).is_file() and (folder / "rank0").is_dir())


def find_models(files: Collection[PurePosixPath]) -> list[PurePosixPath]:
    """The ONNX files among files."""
    return [file for file in files if file.suffix.lower() == ".onnx"]


def name_models(folder: Path, models: Collection[PurePosixPath]) -> list[tuple[str, PurePosixPath]]:
    """The models of a folder that are used, with their names. Two may have one name.

    Raises ModelError if genai_config.json names none, or one that does not exist.
    """
    if (folder / GENAI).is_file():
        roles = _read_genai(folder)
        if missing := [path for path in roles.values() if path not in models]:
            raise ModelError(f"{folder / GENAI} names the model {missing[0]}, which is not in {folder}")
        return [*roles.items()]
    return [(name, path) for path, name in module_names(models).items()]


def _read_genai(folder: Path) -> dict[str, PurePosixPath]:
    """The models that genai_config.json names, by role."""
    models: dict[str, PurePosixPath] = {}
    for role, section in _sections(folder):
        if (path := PurePosixPath(section["filename"])) not in models.values():
            models[role] = path
    if not models:
        raise ModelError(f"{folder / GENAI} names no ONNX model: each is the 'filename' of an object below 'model'")
    return models


def read_genai_section(folder: Path, model: str) -> dict[str, Any]:
    """The section of genai_config.json for a model, which is named by its path; empty if there is none."""
    sections = _sections(folder) if (folder / GENAI).is_file() else ()
    return next((section for _, section in sections if section["filename"] == model), {})


def _sections(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of genai_config.json below `model` that have a `filename` of a model, with their roles."""

    def walk(role: str, value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        if isinstance(value, list):
            for inner in value:
                yield from walk(role, inner)
        elif isinstance(value, dict):
            file = value.get("filename")
            if isinstance(file, str) and file.endswith(".onnx"):
                yield role, value
            for key, inner in value.items():
                yield from walk(key, inner)

    return walk("model", read_config(folder / GENAI).get("model"))
