"""Arrays on disk, and arrays made up for a package's inputs."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from polygraphy import json as polygraphy_json
from polygraphy.exception import PolygraphyException

from splitc.runtime.errors import FeedError, MisuseError
from splitc.runtime.manifest import Fill, Tensor

Array = npt.NDArray[Any]


def load_arrays(path: Path) -> dict[str, Array]:
    """Arrays by name from an .npz file, a folder of NAME.npy files, or the first feed of polygraphy's JSON.

    Raises FeedError when there is no such file or it is none of these.
    """
    try:
        if path.is_dir():
            return {file.stem: np.load(file, allow_pickle=False) for file in sorted(path.glob("*.npy"))}
        if path.suffix == ".json":
            feeds = polygraphy_json.load_json(str(path), description="inputs")
            return {name: np.asarray(array) for name, array in feeds[0].items()}
        with np.load(path, allow_pickle=False) as archive:
            return dict(archive)
    except FileNotFoundError:
        raise FeedError(f"no such file: {path}") from None
    except (OSError, ValueError, TypeError, zipfile.BadZipFile, PolygraphyException) as error:
        raise FeedError(
            f"can't read arrays from {path}: it is no .npz, folder of .npy, or polygraphy JSON ({error})"
        ) from error


def save_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays to an .npz file, or as polygraphy's JSON where the name ends in .json. All of it or nothing."""
    if not path.absolute().parent.is_dir():
        raise MisuseError(f"there is no folder {path.absolute().parent} to write {path.name} into")
    with tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=f".{path.name}-") as folder:
        aside = Path(folder) / path.name
        if path.suffix == ".json":
            polygraphy_json.save_json([dict(arrays)], str(aside))
        else:
            with aside.open("wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
        aside.replace(path)


def make_inputs(inputs: list[Tensor], seed: int = 0) -> dict[str, Array]:
    """Seeded arrays in the shapes that the package was planned for, filled as the compiler found sensible."""
    generator = np.random.default_rng(seed)
    return {tensor.name: _fill(tensor, generator) for tensor in inputs}


def _fill(tensor: Tensor, generator: np.random.Generator) -> Array:
    shape = tuple(tensor.sample_shape or ())
    fill = tensor.fill or Fill("normal")
    dtype = np.dtype(tensor.dtype)
    if fill.kind == "ones":
        return np.ones(shape, dtype)
    if fill.kind == "positions":
        return np.broadcast_to(np.arange(shape[-1] if shape else 1), shape).astype(dtype)
    if fill.kind == "index":
        return np.asarray(generator.integers(0, fill.below, shape)).astype(dtype)
    return np.asarray(generator.standard_normal(shape)).astype(dtype)
