"""Bindings that are kept from run to run, on the CPU's memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from models.writer import save
from splitc.runtime.arrays.ort_values import host_array
from splitc.runtime.engines.kept_binding import KeptBinding
from splitc.runtime.engines.onnxruntime_cpu import ERRORS
from splitc.runtime.gpu.array import GpuArray

OPTIONS = ort.RunOptions()


@pytest.fixture
def binding(tmp_path: Path) -> KeptBinding:
    """Of a model with `sum` = `a` + `b` and `twice` = `a` + `a`, which lists `sum` two times."""
    size = ir.Shape(["n"])
    a, b = (ir.val(name, ir.DataType.FLOAT, size) for name in "ab")
    nodes = [ir.Node("", "Add", [a, b]), ir.Node("", "Add", [a, a])]
    outputs = [node.outputs[0] for node in nodes]
    for value, name in zip(outputs, ("sum", "twice"), strict=True):
        value.name, value.shape, value.dtype = name, size, ir.DataType.FLOAT
    graph = ir.Graph([a, b], [outputs[0], *outputs], nodes=nodes, opset_imports={"": 17})
    save(ir.Model(graph, ir_version=8), tmp_path / "m.onnx")
    return KeptBinding(ort.InferenceSession(str(tmp_path / "m.onnx")), ("cpu", 0))


def at(array: Any) -> GpuArray:
    return GpuArray(array.ctypes.data, array.shape, str(array.dtype), array)


def numbers(*values: float) -> Any:
    return np.array(values, "f4")


def lists(made: Mapping[str, ort.OrtValue]) -> dict[str, list[float]]:
    return {name: host_array(value).tolist() for name, value in made.items()}


@pytest.mark.parametrize(("name", "other"), [("sum", "twice"), ("twice", "sum")])
def test_arrays_may_change_move_and_grow(binding: KeptBinding, name: str, other: str) -> None:
    a, b, into = numbers(1, 2), numbers(10, 20), numbers(0, 0)
    for _ in range(2):
        expected = {"sum": (a + b).tolist(), "twice": (2 * a).tolist()}
        made = binding.run({"a": at(a), "b": at(b)}, {}, {name: at(into)}, OPTIONS)
        assert lists(made) == {other: expected[other]}
        assert into.tolist() == expected[name]
        a[:] = 5, 6
    before, longer = into.tolist(), numbers(1, 2, 3)
    made = binding.run({"a": at(longer)}, {"b": longer}, {}, OPTIONS)
    assert lists(made) == {"sum": [2, 4, 6], "twice": [2, 4, 6]}
    assert into.tolist() == before  # it is not written to any more


def test_all_outputs_may_be_in_place(binding: KeptBinding) -> None:
    a, b, places = numbers(1, 2), numbers(10, 20), {name: numbers(0, 0) for name in ("sum", "twice")}
    for _ in range(2):
        made = binding.run({"a": at(a), "b": at(b)}, {}, {name: at(each) for name, each in places.items()}, OPTIONS)
        assert made == {}
        assert [each.tolist() for each in places.values()] == [(a + b).tolist(), (2 * a).tolist()]
        a = numbers(*(a + 1))


def test_outputs_belong_to_the_caller(binding: KeptBinding) -> None:
    a, b = numbers(1, 2), numbers(10, 20)
    first = host_array(binding.run({"a": at(a), "b": at(b)}, {}, {}, OPTIONS)["sum"])
    b[:] = 100, 200
    binding.run({"a": at(a), "b": at(b)}, {}, {}, OPTIONS)
    assert first.tolist() == [11, 22]


def test_after_an_error_all_is_bound_again(binding: KeptBinding) -> None:
    a, b = numbers(1, 2), numbers(10, 20)
    with pytest.raises(ERRORS, match="Add"):
        binding.run({"a": at(a), "b": at(numbers(1, 2, 3))}, {}, {}, OPTIONS)
    assert lists(binding.run({"a": at(a), "b": at(b)}, {}, {}, OPTIONS))["sum"] == [11, 22]
