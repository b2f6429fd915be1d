"""ONNX Runtime's engines on the CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from splitc.runtime import Session
from splitc.runtime.engines.onnxruntime_cpu import OnnxRuntimeBackend
from splitc.runtime.errors import PackageError
from tests.helpers.packages import compile_mode

MODEL = '<ir_version: 8, opset_import: ["" : 17]> g (float[n] x) => (float[n] y) { y = Neg(x) }'


def test_what_a_run_gave_is_not_written_over(write_model: Callable[[str], Path]) -> None:
    backend = OnnxRuntimeBackend(1)
    engine = backend.load(write_model(MODEL))
    made = [engine.run({"x": backend.upload(np.full(4, number, np.float32))})["y"] for number in range(5)]
    arrays = [backend.download({"y": value})["y"] for value in made]
    del made
    engine.run({"x": backend.upload(np.full(4, 9, np.float32))})
    assert [array.tolist() for array in arrays] == [[-number] * 4 for number in range(5)]


def test_a_state_does_not_keep_the_one_before(write_model: Callable[[str], Path]) -> None:
    """While an engine computes one state from another, there are two of them, and never three."""
    backend = OnnxRuntimeBackend(1)
    engine = backend.load(write_model(MODEL))
    value = engine.run({"x": backend.upload(np.ones(1 << 20, np.float32))})["y"]
    places = set()
    for _ in range(10):
        value = engine.run({"x": value})["y"]
        gc.collect()
        places.add(value.data_ptr())
    assert len(places) == 2


def test_options_of_a_run_have_an_entry() -> None:
    """Without one, each run raises and catches an exception in ONNX Runtime."""
    assert OnnxRuntimeBackend(1)._options.get_run_config_entry("gpu_graph_id") == "-1"


def test_onnxruntime_that_is_too_old_is_refused(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its error about arenas would be a traceback."""
    package = compile_mode(decoder, "layer")
    monkeypatch.setattr(ort, "__version__", "1.22.1")
    with pytest.raises(PackageError, match=r"ONNX Runtime 1.22.1 is too old: pip install 'onnxruntime-gpu>=1.23'"):
        Session(package, threads=1)


@pytest.mark.parametrize(
    "order, sizes, made",
    [("1, 0, 2", "a, b, 2", "b, a, 2"), ("1, 2, 0", "2, a, b", "a, b, 2"), ("1, 2, 0, 3", "a, b, c, 2", "b, c, a, 2")],
)
def test_a_product_after_a_transpose_and_a_cast(
    order: str, sizes: str, made: str, write_model: Callable[[str], Path]
) -> None:
    """ONNX Runtime's own optimizer would end the process while it loads the model."""
    model = write_model(f"""<ir_version: 8, opset_import: ["" : 17]> g (int64[{sizes}] x) => (float[{made}] y)
        <float[2, 2] w = {{1, 2, 3, 4}}> {{
            t = Transpose <perm = [{order}]> (x)
            c = Cast <to = 1> (t)
            y = MatMul (c, w)
        }}""")
    backend = OnnxRuntimeBackend(1)
    shape = [int(size) if size.isdigit() else 3 for size in sizes.split(", ")]
    x = np.arange(np.prod(shape)).reshape(shape)
    y = backend.download({"y": backend.load(model).run({"x": backend.upload(x)})["y"]})["y"]
    axes = [int(axis) for axis in order.split(", ")]
    assert np.array_equal(y, x.transpose(axes) @ np.array([[1, 2], [3, 4]]))
