"""Arrays on disk, and arrays made up for a package's inputs."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from polygraphy import json as polygraphy_json
from polygraphy.exception import PolygraphyException

from splitc.runtime.errors import FeedError, MisuseError
from splitc.runtime.manifest import Fill, Tensor

Array = npt.NDArray[Any]

OPERATIONS: dict[str, np.ufunc] = {"sum": np.add, "max": np.maximum}


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
                np.savez(file, **arrays)  # type: ignore[arg-type]  # newer numpy has an argument beside
        aside.replace(path)


def number_type(name: str) -> np.dtype[Any]:
    """The numpy type of that name; bfloat16 and the like are ml_dtypes'."""
    try:
        known: np.dtype[Any] = np.dtype(name)
    except TypeError:
        import ml_dtypes

        known = np.dtype(getattr(ml_dtypes, name))
    return known


def zeros(shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
    """Zeros that take no memory, and can't be written to."""
    return np.broadcast_to(np.zeros((), dtype), tuple(shape))


def is_zeros(array: Array) -> bool:
    """Whether the array was made by `zeros`, as far as one can tell without looking at all of it."""
    return bool(array.size) and not any(array.strides) and not array.flat[0]  # all elements are in one place


def accumulate_arrays(operation: str, total: Array, part: Array) -> None:
    """Bring `part` into `total`, in place, by `sum` or `max`."""
    OPERATIONS[operation](total, part, out=total)


def make_inputs(inputs: list[Tensor], seed: int = 0) -> dict[str, Array]:
    """Seeded arrays in the shapes that the package was planned for, filled as the compiler found sensible."""
    generator = np.random.default_rng(seed)
    return {
        tensor.name: fill_array(tensor.fill or Fill("normal"), tensor.dtype, tensor.sample_shape or (), generator)
        for tensor in inputs
    }


def fill_array(fill: Fill, dtype: str, shape: Sequence[int], generator: np.random.Generator) -> Array:
    """An array of this type and shape, filled as `fill` says."""
    shape = tuple(shape)
    if fill.kind == "ones":
        array: Array = np.ones(shape)
    elif fill.kind == "positions":
        array = np.broadcast_to(np.arange(shape[-1] if shape else 1), shape)
    elif fill.kind == "index":
        array = np.asarray(generator.integers(0, fill.below, shape))
    else:
        array = np.asarray(generator.standard_normal(shape))
    return array.astype(np.dtype(dtype))
