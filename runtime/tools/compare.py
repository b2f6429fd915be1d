"""Compare a package's outputs with those of the unsplit model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

# Tolerances relative to each output's largest value: several times the error that ONNX Runtime's own optimizations
# cause in an unsplit model (5e-6 in float32, 4e-4 in float16, 8e-4 in int8, 7e-3 in int4).
RELATIVE = {
    "float64": 1e-6,
    "float32": 1e-4,
    "float16": 4e-3,
    "bfloat16": 3e-2,
    "int8": 2e-2,
    "int4": 3e-2,
    "int2": 1e-1,
}
# Added to that: an output of zeros has no largest value. A choice: several times what rounding does to
# numbers of float32 near one.
ABSOLUTE = 1e-6
# Why an output differs that has a NaN or an infinity where the other has none.
NOT_FINITE = "NaN or infinity in one of them only"


@dataclass(frozen=True)
class Difference:
    """The error of one output.

    `absolute` is the largest error, at the index `where`; `relative` is that divided by the largest expected value.
    `allowed` is the largest relative error that passes. `problem` says why the arrays can't be compared: a shape, a
    number type, or a NaN in one of them.
    """

    name: str
    absolute: float
    relative: float
    where: tuple[int, ...]
    expected: float
    actual: float
    passed: bool
    allowed: float = 0.0
    problem: str | None = None


def compare(
    expected: Mapping[str, npt.NDArray[Any]],
    actual: Mapping[str, npt.NDArray[Any]],
    *,
    number_type: str = "float32",
    rtol: float | None = None,
    atol: float | None = None,
) -> list[Difference]:
    """Compare output by output. One passes if its largest error is at most `atol` + `rtol` x its largest value.

    The default `rtol` is that of `number_type`, and at least the machine epsilon of the output's type. Integers and
    booleans must be equal.
    """
    atol = ABSOLUTE if atol is None else atol
    known = RELATIVE.get(number_type, RELATIVE["float32"])
    return [
        _difference(name, array, actual.get(name), max(known, _step(array.dtype)) if rtol is None else rtol, atol)
        for name, array in expected.items()
    ]


def _is_exact(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biu"


def _step(dtype: np.dtype[Any]) -> float:
    """The machine epsilon of a number type: rounding may change a result by this relative error. 0 for integers."""
    return 0.0 if _is_exact(dtype) else float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]


def _difference(
    name: str, expected: npt.NDArray[Any], actual: npt.NDArray[Any] | None, rtol: float, atol: float
) -> Difference:
    if actual is None:
        return _incomparable(name, "it is missing")
    if expected.shape != actual.shape:
        return _incomparable(name, f"its shape is {actual.shape}, expected {expected.shape}")
    if expected.dtype != actual.dtype:
        return _incomparable(name, f"its type is {actual.dtype}, expected {expected.dtype}")
    if not expected.size:
        return Difference(name, 0.0, 0.0, (), 0.0, 0.0, True)
    wide_expected, wide_actual = expected.astype(np.float64), actual.astype(np.float64)
    # Equal infinities agree, and so do NaNs on both sides. A NaN on one side does not.
    with np.errstate(invalid="ignore"):
        error = np.abs(wide_expected - wide_actual)
    same = (wide_expected == wide_actual) | (np.isnan(wide_expected) & np.isnan(wide_actual))
    error = np.where(same, 0.0, np.where(np.isnan(error), np.inf, error))
    where = tuple(int(i) for i in np.unravel_index(int(np.argmax(error)), error.shape))
    finite = np.abs(wide_expected[np.isfinite(wide_expected)])
    largest = float(finite.max()) if finite.size else 0.0
    absolute = float(error[where])
    tolerance = 0.0 if _is_exact(expected.dtype) else atol + rtol * largest
    return Difference(
        name,
        absolute,
        absolute / largest if largest else absolute,
        where,
        float(wide_expected[where]),
        float(wide_actual[where]),
        passed=absolute <= tolerance,
        allowed=tolerance / largest if largest else tolerance,
        problem=NOT_FINITE if np.isinf(absolute) else None,
    )


def _incomparable(name: str, problem: str) -> Difference:
    return Difference(name, np.inf, np.inf, (), np.nan, np.nan, False, problem=problem)
