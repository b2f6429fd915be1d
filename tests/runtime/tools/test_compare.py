from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from splitc.runtime.arrays.array import number_type
from splitc.runtime.tools.compare import compare


def test_largest_error_and_its_place_are_found() -> None:
    expected = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    actual = expected + np.array([[0, 0], [0.5, 0.1]], np.float32)
    (found,) = compare({"y": expected}, {"y": actual})
    assert found.where == (1, 0)
    assert found.absolute == pytest.approx(0.5)
    assert found.relative == pytest.approx(0.125)
    assert (found.expected, found.actual) == (3.0, 3.5)
    assert not found.passed


@pytest.mark.parametrize(("number_type", "passed"), [("float32", False), ("float16", True), ("int4", True)])
def test_tolerance_goes_with_the_number_type(number_type: str, passed: bool) -> None:
    (found,) = compare({"y": np.ones(3)}, {"y": np.ones(3) + 1e-3}, number_type=number_type)
    assert found.passed is passed


def test_tolerances_given_replace_the_default() -> None:
    arrays = {"y": np.ones(3)}, {"y": np.ones(3) + 0.1}
    assert compare(*arrays, rtol=0.2)[0].passed
    assert compare(*arrays, atol=0.2)[0].passed


def test_whole_numbers_must_be_equal() -> None:
    assert not compare({"y": np.array([1000])}, {"y": np.array([1001])}, rtol=1)[0].passed
    assert compare({"y": np.array([True])}, {"y": np.array([True])})[0].passed


def test_same_nan_and_infinity_agree_others_do_not() -> None:
    special = np.array([np.nan, np.inf, -np.inf, 1.0])
    assert compare({"y": special}, {"y": special})[0].passed
    (found,) = compare({"y": np.zeros(4)}, {"y": special})
    assert not found.passed
    assert found.problem


@pytest.mark.parametrize("other", [{}, {"y": np.zeros(4)}, {"y": np.zeros(3, np.float32)}])
def test_missing_output_other_shape_and_other_type_differ(other: dict[str, np.ndarray]) -> None:
    (found,) = compare({"y": np.zeros(3)}, other)
    assert not found.passed
    assert found.problem


def test_empty_outputs_agree() -> None:
    assert compare({"y": np.zeros((0, 3))}, {"y": np.zeros((0, 3))})[0].passed


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float8_e4m3fn"])
def test_outputs_may_be_rounded_to_the_next_number_of_their_type(kind: str) -> None:
    dtype = number_type(kind)
    expected = np.array([1, 0.5], dtype)
    step = float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]  # the library's own
    near = np.array([1 + step, 0.5], dtype)
    far = np.array([1 + 2 * step, 0.5], dtype)
    assert [compare({"y": expected}, {"y": each})[0].passed for each in (expected, near, far)] == [True, True, False]
    assert not compare({"y": expected}, {"y": near}, rtol=1e-5)[0].passed
