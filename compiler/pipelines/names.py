"""The names of modules: from a model's path, and the aliases that users know for some of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import PurePosixPath

from splitc.runtime.errors import MisuseError

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
