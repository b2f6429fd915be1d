"""Settings, which bind inputs to constants: `--set use_cache_branch=true`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from splitc.runtime.arrays.array import number_type
from splitc.runtime.errors import MisuseError


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Values from `NAME=true`, `NAME=16000` or `NAME=[1,2]`. Raises MisuseError for any other text.

    And for a name that comes twice.
    """
    settings = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if name in settings:
            raise MisuseError(f"--set gives '{name}' twice, the second time by {text}: leave out one of them")
        try:
            settings[name] = json.loads(value.lower())
        except ValueError:
            equals = ""
        if not name or not equals:
            raise MisuseError(f"can't read --set {text}: write NAME=VALUE, with true, false, a number, or [1,2,3]")
    return settings


def setting_array(name: str, given: Any, dtype: str, shape: Sequence[int | str | None] | None) -> npt.NDArray[Any]:
    """The value as an array of an input's type and shape. A single number fills the whole array.

    Raises MisuseError for a value that does not fit the input.
    """
    array = np.asarray(given)
    if array.dtype.kind not in "bif":
        raise MisuseError(f"--set {name}={given}: the input takes {dtype}: give a number, true or false")
    wanted = array.astype(number_type(dtype))
    if not np.array_equal(wanted.astype(array.dtype), array):
        raise MisuseError(f"--set {name}={given}: the input takes {dtype}, which has no such value")
    sizes = list(array.shape if shape is None else shape)
    known = [size for size in sizes if isinstance(size, int)]
    if array.ndim == 0 and len(known) == len(sizes):
        return np.full(known, wanted)
    pairs = zip(sizes, array.shape, strict=True)
    if len(sizes) != array.ndim or any(isinstance(size, int) and size != own for size, own in pairs):
        asked = " x ".join("?" if size is None else str(size) for size in sizes)
        raise MisuseError(f"--set {name}={given}: the input has the shape {asked}, so give a value of that shape")
    return wanted
