"""Packages with ONNX Runtime's interface agree with ONNX Runtime on the model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from models.writer import Writer, save
from splitc.compiler import compile_model, plan_model
from splitc.runtime import InferenceSession, MisuseError, Session
from splitc.runtime.arrays.ort_values import host_array, host_value
from tests.conftest import decoder_feeds

CPU = ["CPUExecutionProvider"]


@pytest.fixture(scope="module")
def own(package: Path) -> Iterator[InferenceSession]:
    opened = InferenceSession(package, providers=CPU)
    yield opened
    opened.session.close()


@pytest.fixture(scope="module")
def whole(decoder: Path) -> Any:
    return onnxruntime.InferenceSession(decoder, providers=CPU)


def described(arguments: Any) -> list[tuple[str, str, list[int | str | None]]]:
    return [(each.name, each.type, list(each.shape)) for each in arguments]


def test_it_is_described_alike(own: InferenceSession, whole: Any) -> None:
    assert isinstance(own, onnxruntime.InferenceSession)
    assert described(own.get_inputs()) == described(whole.get_inputs())
    assert described(own.get_outputs()) == described(whole.get_outputs())
    assert own.get_overridable_initializers() == []
    assert own.get_providers() == whole.get_providers() == CPU
    assert own.get_provider_options() == whole.get_provider_options()
    assert own.get_modelmeta().graph_name == "decoder.onnx"


def test_outputs_are_those_of_onnx_runtime(own: InferenceSession, whole: Any) -> None:
    feeds = decoder_feeds()
    names = [each.name for each in whole.get_outputs()]
    for asked in (None, [names[2], names[0]]):
        for one, other in zip(own.run(asked, feeds), whole.run(asked, feeds), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
    listed = {name: array.tolist() if name == "input_ids" else array for name, array in feeds.items()}
    np.testing.assert_array_equal(own.run(None, listed)[0], own.run(None, feeds)[0])


def test_numbers_without_axes_get_none(tmp_path: Path) -> None:
    w = Writer()
    x = w.input("x", ir.DataType.FLOAT, ["n"])
    w.output(w.op("ReduceSum", x, keepdims=0), "y", ir.DataType.FLOAT, [])
    save(w.model(), tmp_path / "model.onnx")
    compile_model(plan_model(tmp_path / "model.onnx", ["cpu0"]), tmp_path / "package")
    opened = InferenceSession(tmp_path / "package", providers=CPU)
    binding = opened.io_binding()
    binding.bind_cpu_input("x", np.ones(3, np.float32))
    binding.bind_output("y")
    opened.run_with_iobinding(binding)
    (value,) = binding.get_outputs()
    opened.session.close()
    assert value.shape() == [] and value.numpy() == 3


@pytest.mark.parametrize(
    "changed",
    [
        {"input_ids": None},
        {"input_ids": np.zeros((1, 16), np.int32)},
        {"input_ids": np.zeros(16, np.int64)},
        {"zzz": np.zeros(1)},
    ],
)
def test_what_is_refused_there_is_refused_alike(own: InferenceSession, whole: Any, changed: dict[str, Any]) -> None:
    feeds = {name: array for name, array in {**decoder_feeds(), **changed}.items() if array is not None}
    with pytest.raises(Exception) as there:  # whatever it is
        whole.run(None, feeds)
    with pytest.raises(there.type):
        own.run(None, feeds)
    with pytest.raises(there.type):
        own.run_async(None, feeds, lambda *_: None, None)


def test_unknown_outputs(own: InferenceSession, whole: Any) -> None:
    for session in (own, whole):
        with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument, match="output name:nope"):
            session.run(["nope"], decoder_feeds())


def test_runs_that_end_later(own: InferenceSession) -> None:
    ended, got = threading.Event(), []

    def done(outputs: list[Any], data: str, error: str) -> None:
        got.append((outputs, data, error))
        ended.set()

    own.run_async(["logits"], decoder_feeds(), done, "mine")
    assert ended.wait(30)
    ((outputs, data, error),) = got
    assert (data, error) == ("mine", "")
    np.testing.assert_array_equal(outputs[0], own.run(["logits"], decoder_feeds())[0])


def test_io_bindings_run_on_the_host(own: InferenceSession) -> None:
    feeds = decoder_feeds()
    (expected,) = own.run(["logits"], feeds)
    binding = own.io_binding()
    for number, (name, array) in enumerate(feeds.items()):
        if number % 3 == 0:
            binding.bind_cpu_input(name, array)
        elif number % 3 == 1:
            binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
        else:
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    place, names = np.zeros_like(expected), [each.name for each in own.get_outputs()]
    binding.bind_output("logits", "cpu", 0, np.float32, place.shape, place.ctypes.data)
    binding.bind_output(names[1])
    own.run_with_iobinding(binding)
    np.testing.assert_array_equal(place, expected)
    assert [value.shape() for value in binding.get_outputs()] == [list(a.shape) for a in binding.copy_outputs_to_cpu()]
    binding.clear_binding_outputs()
    value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(list(expected.shape), np.float32)
    binding.bind_ortvalue_output("logits", value)
    own.run_with_iobinding(binding)
    np.testing.assert_array_equal(value.numpy(), expected)
    with pytest.raises(MisuseError, match="has the type 8, which is no number type"):
        binding.bind_input("input_ids", "cpu", 0, 8, (1,), 0)  # ONNX's strings
    with pytest.raises(MisuseError, match="use io_binding"):
        own.run_with_iobinding(onnxruntime.IOBinding(own))
    binding.bind_output("logits", "cpu", 0, np.float32, (1, 2), place.ctypes.data)
    with pytest.raises(MisuseError, match="and its place"):
        own.run_with_iobinding(binding)


def test_run_with_ort_values(own: InferenceSession) -> None:
    feeds = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in decoder_feeds().items()}
    (logits,) = own.run_with_ort_values(["logits"], feeds)
    np.testing.assert_array_equal(logits.numpy(), own.run(["logits"], decoder_feeds())[0])


def test_types_that_numpy_lacks(tmp_path: Path) -> None:
    """And outputs in memory of the caller: ONNX Runtime keeps a bound value that its caller may drop."""
    w = Writer()
    x = w.input("x", ir.DataType.BFLOAT16, ["n"])
    wide = w.op("Cast", x, to=ir.DataType.FLOAT)
    w.output(w.op("Cast", w.op("Mul", wide, wide), to=ir.DataType.BFLOAT16), "y", ir.DataType.BFLOAT16, ["n"])
    save(w.model(), tmp_path / "model.onnx")
    compile_model(plan_model(tmp_path / "model.onnx", ["cpu0"]), tmp_path / "package")
    opened = InferenceSession(tmp_path / "package", providers=CPU)
    fed, place = host_value(np.array([1, 2, 3], ml_dtypes.bfloat16)), np.zeros(3, ml_dtypes.bfloat16)
    (squared,) = opened.run_with_ort_values(None, {"x": fed})
    assert host_array(squared).tolist() == [1, 4, 9]
    binding = opened.io_binding()
    binding.bind_ortvalue_input("x", fed)
    binds: list[Callable[[], None]] = [
        lambda: binding.bind_output("y"),
        lambda: binding.bind_ortvalue_output("y", host_value(np.zeros(3, ml_dtypes.bfloat16))),
        lambda: binding.bind_output("y", "cpu", 0, ir.DataType.BFLOAT16.value, (3,), place.ctypes.data),
    ]
    for bind in binds:
        bind()
        opened.run_with_iobinding(binding)
        (value,) = binding.get_outputs()
        assert host_array(value).tolist() == [1, 4, 9]
    assert place.tolist() == [1, 4, 9]
    binding.bind_ortvalue_output("y", host_value(np.zeros(3, np.int8)))
    with pytest.raises(MisuseError, match=r"the type bfloat16, and its place .* the type int8"):
        opened.run_with_iobinding(binding)
    opened.session.close()


def test_session_options_and_providers(package: Path) -> None:
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    opened = InferenceSession(str(package), settings, devices="3xcpu")
    assert (opened.session.threads, opened.get_session_options()) == (1, settings)
    opened.session.close()
    with pytest.raises(MisuseError, match="runs on cpu0, cpu1, cpu2, by CPUExecutionProvider"):
        InferenceSession(package, providers=[("CUDAExecutionProvider", {"device_id": 1})])
    with Session(package) as session:
        with pytest.raises(MisuseError, match="providers are CUDAExecutionProvider"):
            InferenceSession(session, providers=["CUDAExecutionProvider"])
        session.check_usable()  # it is the caller's
    with pytest.raises(MisuseError, match="not the bytes"):
        InferenceSession(b"model")  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match="a package has no 'end_profiling'"):
        opened.end_profiling()
