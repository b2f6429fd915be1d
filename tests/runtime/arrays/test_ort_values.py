"""Arrays as ONNX Runtime's values, and back."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from splitc.runtime.arrays.array import number_type
from splitc.runtime.arrays.ort_values import host_array, host_value


@pytest.mark.parametrize("dtype", ["float32", "bool", "bfloat16"])
def test_array_of_a_value_keeps_the_memory_of_the_one_that_it_was_made_of(dtype: str) -> None:
    memory = np.ones(1000, number_type(dtype))
    kept, array = weakref.ref(memory), host_array(host_value(memory))
    del memory
    assert kept() is not None and array.dtype == number_type(dtype) and array.all()
