"""The split modes by name, each in a module of this package. This module imports none of the compiler's libraries."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from splitc.runtime.errors import MisuseError

if TYPE_CHECKING:
    from splitc.compiler.modes.mode import Mode

AUTO = "auto"
# Each device is a group of its own that has the whole model.
BATCH = "batch"
# What each mode does, for the command line's help. Row mode is Megatron's column-parallel.
MODES = {
    "layer": "consecutive blocks to each device",
    "tensor": "a shard of every block to each device, at the same time",
    BATCH: "the whole model to each device, which computes its rows of a batch",
    "row": "slices of the large matmul weights to each device, and all else to the main one",
}
# The modes that can split any model.
FALLBACKS = ("layer",)


def find_mode(name: str) -> Mode:
    """The mode of this name. Raises MisuseError if there is none."""
    if name not in MODES:
        raise MisuseError(f"unknown split mode '{name}': there are {', '.join(MODES)}")
    mode: Mode = import_module(f"splitc.compiler.modes.{name}").MODE
    return mode


def describe_modes() -> str:
    """The modes in one line, for help texts."""
    return " ".join(f"{name}: {what}." for name, what in known_modes().items())


def known_modes() -> dict[str, str]:
    """The modes that can be asked for, with what each one does."""
    return {AUTO: "the mode that is predicted to be best and fits", **MODES}
