"""What tables name as `module:attribute`, so that a machine needs only the libraries of what it uses."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def load_entry(entry: str) -> Any:
    """Import what an entry names. Raises what the import of its module raises."""
    module, _, attribute = entry.partition(":")
    return getattr(import_module(module), attribute)
