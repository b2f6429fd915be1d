"""The split modes by name, each a module of this package. Importing this needs no library of the compiler's."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from splitc.runtime.errors import MisuseError

if TYPE_CHECKING:
    from splitc.compiler.modes.mode import Mode

AUTO = "auto"
# What each mode does, in the words of the command line's help.
MODES = {
    "layer": "consecutive blocks to each device",
    "tensor": "a part of every block to each device, at the same time",
    "row": "slices of the large matmul weights to each device, and all else to the main one",
}
# The modes that any model can be split in.
FALLBACKS = ("layer",)


def find_mode(name: str) -> Mode:
    """The mode of this name. Raises MisuseError where there is none."""
    if name not in MODES:
        raise MisuseError(f"unknown split mode '{name}': there are {', '.join(MODES)}")
    mode: Mode = import_module(f"splitc.compiler.modes.{name}").MODE
    return mode


def describe_modes() -> str:
    """The modes in one line of help."""
    return " ".join(
        f"{name}: {what}." for name, what in {AUTO: "what is predicted to be the best that fits", **MODES}.items()
    )
