"""Checks of the files that a command is asked to write."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from splitc.runtime.errors import MisuseError
from splitc.runtime.files.written import check_not_read, check_output, is_replaced


def check_outputs(outputs: Mapping[str, Path | None], reads: Iterable[Path | None]) -> None:
    """Raise MisuseError for an output that can't be written, that is read, or that has the path of another one.

    `outputs` are paths by the names of their options. A model's external data count as read.
    """
    written = {name: path for name, path in outputs.items() if path is not None}
    sources = [path for path in reads if path is not None]
    for path in written.values():
        check_output(path, sources)
    if any(path.exists() for path in written.values()):  # or else none is overwritten: models are slow to parse
        from splitc.runtime.engines.onnx_session import data_files  # loads ONNX Runtime

        data = [file for source in sources if source.suffix == ".onnx" for file in data_files(source)]
        for path in written.values():
            check_not_read(path, data)
    places: dict[str, str] = {}
    for name, path in written.items():
        other = places.setdefault(os.path.realpath(path), name)
        if other != name and is_replaced(path):
            raise MisuseError(f"{other} and {name} are both {path}: choose another name for one of them")
