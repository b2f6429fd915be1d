"""Files of arrays by name: numpy's, and polygraphy's JSON."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from splitc.runtime.arrays.array import Array
from splitc.runtime.errors import FeedError, MisuseError
from splitc.runtime.files.written import written_whole

# The kinds of numpy's types that are numbers, truth values, or raw bytes of ml_dtypes' types.
NUMBERS = "biufcV"
# The kinds of numpy's files.
NPZ, NPY = "an .npz archive", "a single array (.npy)"


def load_arrays(path: Path) -> dict[str, Array]:
    """Arrays by name from an .npz file, a folder of NAME.npy files, or the first feed of polygraphy's JSON.

    Slashes in a name are subfolders. Raises FeedError if there is no such file or it is none of these.
    """
    if path.is_dir():
        arrays = _load_folder(path)
    elif path.suffix == ".json":
        arrays = _load_json(path)
    elif _kind(path) == NPY:
        raise FeedError(
            f"can't read arrays from {path}: it is {NPY}, without a name: put it as NAME.npy into a folder, "
            "and give the folder; or write it by np.savez(path, NAME=array)"
        )
    else:
        arrays = _read(path, NPZ)
    for name, array in arrays.items():
        if array.dtype.kind not in NUMBERS:
            raise FeedError(f"{path} has values of type {array.dtype} for '{name}', which are no numbers")
    return arrays


def _load_folder(path: Path) -> dict[str, Array]:
    files = {file.relative_to(path).as_posix(): file for file in sorted(path.rglob("*.npy"))}
    if not files:
        raise FeedError(f"can't read arrays from {path}: the folder has no files NAME.npy in it")
    return {name[: -len(".npy")]: _read(file, NPY)[""] for name, file in files.items()}


def _load_json(path: Path) -> dict[str, Array]:
    # Imported where it is needed, since that takes a tenth of a second.
    from polygraphy import json as polygraphy_json
    from polygraphy.logger import G_LOGGER

    _check_file(path)
    try:
        with G_LOGGER.verbosity(G_LOGGER.CRITICAL):  # it would print to standard output
            feeds = polygraphy_json.load_json(str(path), description="inputs")
        if isinstance(feeds, list) and feeds and isinstance(feeds[0], Mapping):
            return {name: np.asarray(array) for name, array in feeds[0].items()}
    except Exception as error:  # polygraphy raises all kinds
        raise FeedError(f"can't read arrays from {path}: it is no JSON of polygraphy's ({error})") from error
    raise FeedError(
        f"can't read arrays from {path}: polygraphy's JSON is a list of arrays by name, [{{NAME: ...}}, ...]"
    )


def _read(path: Path, kind: str) -> dict[str, Array]:
    """The arrays of a numpy file of this kind; the name of a single one is empty. Raises FeedError for another file."""
    if (actual := _kind(path)) != kind:
        raise FeedError(f"can't read arrays from {path}: it is {actual}, and should be {kind}")
    try:
        with path.open("rb") as file:
            content = np.load(file, allow_pickle=False)
            return {"": content} if kind == NPY else {name: np.asarray(array) for name, array in content.items()}
    except MemoryError as error:
        raise FeedError(f"can't read arrays from {path}: {error}") from error
    except ValueError as error:
        if "Object arrays" not in str(error):
            raise FeedError(f"can't read arrays from {path}: the file is damaged ({error})") from error
        raise FeedError(
            f"can't read arrays from {path}: it holds Python objects (numpy's type object), not numbers. Write arrays "
            "of a number type, as in array.astype(np.float32)"
        ) from error
    except Exception as error:  # numpy, zipfile and zlib raise all kinds for damaged files
        raise FeedError(f"can't read arrays from {path}: the file is damaged ({error})") from error


def _kind(path: Path) -> str:
    """What a file is, by its first bytes."""
    _check_file(path)
    with path.open("rb") as file:
        start = file.read(len(np.lib.format.MAGIC_PREFIX))
    if start.startswith(b"PK"):
        return NPZ
    return NPY if start == np.lib.format.MAGIC_PREFIX else "no file of numpy's" if start else "empty"


def _check_file(path: Path) -> None:
    if not path.exists():
        raise FeedError(f"no such file: {path}")
    if not path.is_file():
        raise FeedError(f"can't read arrays from {path}: it is a pipe or a device, not a file or folder")


def check_ending(path: Path) -> None:
    """Raise MisuseError if a file to write ends as one of another format would."""
    if path.suffix not in ("", ".npz", ".json"):
        raise MisuseError(f"can't write {path}: outputs are written as .npz, or as .json, and not as {path.suffix}")


def save_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays atomically to an .npz file, or as polygraphy's JSON if the path ends in .json.

    Number types of ml_dtypes (bfloat16, float8) are written as raw bytes, as numpy would read them anyway. Raises
    MisuseError if the file can't be written, or can't hold arrays of these names.
    """
    if path.suffix == ".json":
        _check_names(arrays)
    with written_whole(path) as file:
        if path.suffix == ".json":
            from polygraphy import json as polygraphy_json

            file.write(polygraphy_json.to_json([{n: _as_known(array) for n, array in arrays.items()}]).encode())
        else:
            _write_npz(file, arrays)


# dtype.isbuiltin of types that libraries add. Of numpy's own types it is 1, and 0 once they were unpickled.
USER_DEFINED = 2


def _as_known(array: Array) -> Array:
    """The array in a number type that numpy can read: types of ml_dtypes become raw bytes."""
    return array if array.dtype.isbuiltin != USER_DEFINED else array.view(np.dtype((np.void, array.dtype.itemsize)))


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
    from polygraphy import json as polygraphy_json

    try:
        polygraphy_json.from_json(polygraphy_json.to_json([dict.fromkeys(names, np.zeros(2))]))
    except Exception as error:  # of any kind, since it misreads the arrays
        raise MisuseError(
            f"polygraphy's JSON can't hold arrays of these names, since some are its own: {', '.join(names)}; write "
            "an .npz file instead"
        ) from error
