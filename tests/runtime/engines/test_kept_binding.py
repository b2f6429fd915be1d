"""Bindings that are kept from run to run, on the CPU's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from models.writer import save
from splitc.runtime.engines.gpu_array import GpuArray
from splitc.runtime.engines.kept_binding import KeptBinding
from splitc.runtime.engines.onnxruntime_cpu import ERRORS, host_array

OPTIONS = ort.RunOptions()


@pytest.fixture
def binding(tmp_path: Path) -> KeptBinding:
    """Of a model with `sum` = `a` + `b` and `twice` = `a` + `a`."""
    size = ir.Shape(["n"])
    a, b = (ir.val(name, ir.DataType.FLOAT, size) for name in "ab")
    nodes = [ir.Node("", "Add", [a, b]), ir.Node("", "Add", [a, a])]
    outputs = [node.outputs[0] for node in nodes]
    for value, name in zip(outputs, ("sum", "twice"), strict=True):
        value.name, value.shape, value.dtype = name, size, ir.DataType.FLOAT
    save(ir.Model(ir.Graph([a, b], outputs, nodes=nodes, opset_imports={"": 17}), ir_version=8), tmp_path / "m.onnx")
    return KeptBinding(ort.InferenceSession(str(tmp_path / "m.onnx")), ("cpu", 0))


def at(array: Any) -> GpuArray:
    return GpuArray(array.ctypes.data, array.shape, str(array.dtype), array)


def numbers(*values: float) -> Any:
    return np.array(values, "f4")


@pytest.mark.parametrize("name", ["sum", "twice"])
def test_arrays_may_change_move_and_grow(binding: KeptBinding, name: str) -> None:
    a, b, into = numbers(1, 2), numbers(10, 20), numbers(0, 0)
    for _ in range(2):
        made = binding.run({"a": at(a), "b": at(b)}, {}, {name: at(into)}, OPTIONS)
        assert [host_array(each).tolist() for each in made] == [(a + b).tolist(), (2 * a).tolist()]
        assert into.tolist() == host_array(made[["sum", "twice"].index(name)]).tolist()
        a[:] = 5, 6
    before, longer = into.tolist(), numbers(1, 2, 3)
    made = binding.run({"a": at(longer)}, {"b": longer}, {}, OPTIONS)
    assert [host_array(each).tolist() for each in made] == [[2, 4, 6], [2, 4, 6]]
    assert into.tolist() == before  # it is not written to any more


def test_outputs_belong_to_the_caller(binding: KeptBinding) -> None:
    a, b = numbers(1, 2), numbers(10, 20)
    first = host_array(binding.run({"a": at(a), "b": at(b)}, {}, {}, OPTIONS)[0])
    b[:] = 100, 200
    binding.run({"a": at(a), "b": at(b)}, {}, {}, OPTIONS)
    assert first.tolist() == [11, 22]


def test_after_an_error_all_is_bound_again(binding: KeptBinding) -> None:
    a, b = numbers(1, 2), numbers(10, 20)
    with pytest.raises(ERRORS, match="Add"):
        binding.run({"a": at(a), "b": at(numbers(1, 2, 3))}, {}, {}, OPTIONS)
    made = binding.run({"a": at(a), "b": at(b)}, {}, {}, OPTIONS)
    assert host_array(made[0]).tolist() == [11, 22]
