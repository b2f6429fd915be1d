"""Entries of tables as `module:attribute`, which are imported on use: a machine only needs the libraries it uses."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def load_entry(entry: str) -> Any:
    """Import what an entry names. Raises the errors of the module's import."""
    module, _, attribute = entry.partition(":")
    return getattr(import_module(module), attribute)
