"""The names of modules: from where a model lies, and the short names by which users know some of them."""

from __future__ import annotations

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
# optimum's names of the two uses of a decoder that chooses by an input: without a cache, and with one.
USES = {"decoder_model_merged": ("decoder_model", "decoder_with_past_model")}


def module_name(path: PurePosixPath, beside: int) -> str:
    """The name of the model at `path` in its folder, with so many others `beside` it.

    That of its subfolder if it is alone there or is called `model`; else its own, without the suffix.
    """
    in_subfolder = len(path.parts) > 1
    return path.parent.name if in_subfolder and (not beside or path.stem == "model") else path.stem


def names_of_uses(name: str) -> tuple[str, str]:
    """The names of the two uses of a model with a switch: where it is false, and where it is true."""
    return USES.get(name, (f"{name}_false", f"{name}_true"))


def find_modules(name: str, modules: Collection[str]) -> list[str]:
    """The modules that a name means: itself, or those of an alias that are there. Empty if there are none."""
    return [name] if name in modules else [module for module in ALIASES.get(name, ()) if module in modules]


def need_modules(name: str, modules: Sequence[str], option: str) -> list[str]:
    """As `find_modules`. Raises MisuseError, which names the option and the modules that there are, for none."""
    if meant := find_modules(name, modules):
        return meant
    short = [f"{alias} ({', '.join(meant)})" for alias in ALIASES if (meant := find_modules(alias, modules))]
    names = ", ".join(modules) + (f"; and in short {', '.join(short)}" if short else "")
    raise MisuseError(f"{option} names the module '{name}', which is not there: there are {names}")
