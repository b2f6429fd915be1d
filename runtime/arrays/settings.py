"""Settings, which bind inputs to constants: `--set use_cache_branch=true`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from splitc.runtime.arrays.array import number_type
from splitc.runtime.errors import MisuseError
from splitc.runtime.units import format_shape, named_values, shortened


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Values from `NAME=true`, `NAME=16000` or `NAME=[1,2]`. Raises MisuseError as `named_values`."""
    form = "NAME=VALUE, with true, false, a number, or [1,2,3]"
    return {name: _parse(name, value, form) for name, value in named_values("--set", texts, form).items()}


def _parse(name: str, value: str, form: str) -> Any:
    try:
        return json.loads(value.lower())
    except (ValueError, RecursionError):
        raise MisuseError(f"can't read --set {name}={shortened(value)}: write {form}") from None


def setting_array(name: str, given: Any, dtype: str, shape: Sequence[int | str | None] | None) -> npt.NDArray[Any]:
    """The value as an array of an input's type and shape. A single number fills the whole array.

    A fraction is rounded to the type. Raises MisuseError for a value that does not fit the input.
    """
    where = f"--set {name}={shortened(str(given))}"
    try:
        array = np.asarray(given)
    except ValueError:  # of lists of several lengths
        raise MisuseError(f"{where}: its lists have several lengths, and an array's have one") from None
    if array.dtype.kind not in "biuf":
        raise MisuseError(f"{where}: the input takes {dtype}: give a number, true or false")
    with np.errstate(over="ignore"):
        wanted = array.astype(number_type(dtype))
    is_rounded = array.dtype.kind == "f" and "float" in dtype
    if not np.array_equal(*map(np.isfinite, (wanted, array)) if is_rounded else (wanted.astype(array.dtype), array)):
        raise MisuseError(f"{where}: the input takes {dtype}, which has no such value")
    sizes = list(array.shape if shape is None else shape)
    known = [size for size in sizes if isinstance(size, int)]
    if array.ndim == 0 and len(known) == len(sizes):
        return np.full(known, wanted)
    pairs = zip(sizes, array.shape, strict=True)
    if len(sizes) != array.ndim or any(isinstance(size, int) and size != own for size, own in pairs):
        raise MisuseError(f"{where}: the input has the shape {format_shape(sizes)}, so give a value of that shape")
    return wanted
