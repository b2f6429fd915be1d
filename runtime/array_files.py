"""Files of arrays by name: numpy's, and polygraphy's JSON."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from polygraphy import json as polygraphy_json
from polygraphy.logger import G_LOGGER

from splitc.runtime.arrays import Array
from splitc.runtime.errors import FeedError, MisuseError
from splitc.runtime.files import written_whole

# The kinds of numpy's types that are numbers, truth values, or raw bytes of ml_dtypes' types.
NUMBERS = "biufcV"


def load_arrays(path: Path) -> dict[str, Array]:
    """Arrays by name from an .npz file, a folder of NAME.npy files, or the first feed of polygraphy's JSON.

    Slashes in a name are subfolders. Raises FeedError if there is no such file or it is none of these.
    """
    try:
        arrays = {name: np.asarray(array) for name, array in _load(path).items()}
    except FileNotFoundError:
        raise FeedError(f"no such file: {path}") from None
    except Exception as error:  # numpy, zipfile, zlib and polygraphy raise all kinds for damaged files
        raise FeedError(
            f"can't read arrays from {path}: it is no .npz, folder of .npy, or polygraphy JSON ({error})"
        ) from error
    for name, array in arrays.items():
        if array.dtype.kind not in NUMBERS:
            raise FeedError(f"{path} has no numbers for '{name}', but values of type {array.dtype}")
    return arrays


def _load(path: Path) -> Mapping[str, Any]:
    if path.is_dir():
        files = {file.relative_to(path).as_posix(): file for file in sorted(path.rglob("*.npy"))}
        return {name[: -len(".npy")]: np.load(file, allow_pickle=False) for name, file in files.items()}
    if path.suffix == ".json":
        with G_LOGGER.verbosity(G_LOGGER.CRITICAL):  # it would print to standard output
            feeds = polygraphy_json.load_json(str(path), description="inputs")
        return dict(feeds[0])
    with np.load(path, allow_pickle=False) as archive:
        return dict(archive)


def save_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays atomically to an .npz file, or as polygraphy's JSON if the path ends in .json.

    Number types of ml_dtypes (bfloat16, float8) are written as raw bytes, as numpy would read them anyway. Raises
    MisuseError if the file can't be written, or can't hold arrays of these names.
    """
    if path.suffix == ".json":
        _check_names(arrays)
    with written_whole(path) as file:
        if path.suffix == ".json":
            file.write(polygraphy_json.to_json([{n: _as_known(array) for n, array in arrays.items()}]).encode())
        else:
            _write_npz(file, arrays)


def _as_known(array: Array) -> Array:
    """The array in a number type that numpy can read: types of ml_dtypes become raw bytes."""
    return array if array.dtype.isbuiltin == 1 else array.view(np.dtype((np.void, array.dtype.itemsize)))


def _write_npz(file: BinaryIO, arrays: Mapping[str, Array]) -> None:
    """Write what np.savez would. That function takes names as arguments, so it fails for an output named `file`."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            # np.load drops the ending .npy, unless there is another member with the shorter name.
            member = name if f"{name}.npy" in arrays else f"{name}.npy"
            with archive.open(member, "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, _as_known(array), allow_pickle=False)


def _check_names(names: Iterable[str]) -> None:
    """Raise MisuseError for names that polygraphy would read as its own keywords."""
    try:
        polygraphy_json.from_json(polygraphy_json.to_json([dict.fromkeys(names, np.zeros(2))]))
    except Exception as error:  # of any kind, since it misreads the arrays
        raise MisuseError(
            f"polygraphy's JSON can't hold arrays of these names, since some are its own: {', '.join(names)}; write "
            "an .npz file instead"
        ) from error
