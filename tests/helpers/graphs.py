"""A model's graph without its analysis."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from splitc.compiler.normal_form.graph import Graph, open_graph
from splitc.compiler.reading.loading import read_model


def read_graph(path: Path, settings: Mapping[str, Any] = MappingProxyType({})) -> Graph:
    """The model's graph in normal form, with inputs bound to `settings`."""
    proto, files = read_model(path)
    return open_graph(path, proto, files, settings)
