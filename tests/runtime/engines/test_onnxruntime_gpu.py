"""ONNX Runtime's engines on GPUs, as far as no GPU is needed."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from splitc.runtime.engines import onnxruntime_gpu
from splitc.runtime.engines.onnxruntime_gpu import OnnxRuntimeGpuBackend
from splitc.runtime.errors import PackageError


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """What takes its time to load; the times at which that began."""
    begun: list[float] = []

    def preload() -> None:
        begun.append(time.monotonic())
        time.sleep(0.02 * len(begun))  # the first to begin is the first to end
        print("loading")

    monkeypatch.setattr(ort, "preload_dlls", preload, raising=False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    onnxruntime_gpu._load_libraries_once.cache_clear()
    yield begun
    onnxruntime_gpu._load_libraries_once.cache_clear()


def test_libraries_are_loaded_once_for_all_threads(libraries: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """Each rank's thread asks for it: two at once would leave standard output where one of them had put it."""
    before = sys.stdout
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: onnxruntime_gpu._load_libraries(), range(8)))
    assert sys.stdout is before
    assert len(libraries) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "loading\n")


@pytest.mark.parametrize("graphs", [True, False])
def test_what_can_not_be_captured_is_loaded_without_graphs(graphs: bool) -> None:
    asked: list[str] = []

    def open_session(path: Path, options: Any, provider: Mapping[str, str]) -> str:
        asked.append(provider.get("enable_cuda_graph", "0"))
        if asked[-1] == "1":
            raise PackageError("can't load it") from RuntimeError("in whatever words")
        return "session"

    backend = OnnxRuntimeGpuBackend.__new__(OnnxRuntimeGpuBackend)
    backend._cuda_graphs = graphs
    backend._open = open_session  # type: ignore[method-assign]
    session, why = backend._open_capturable(Path("stage0.onnx"), ort.SessionOptions(), {})
    assert session == "session"
    assert asked == (["1", "0"] if graphs else ["0"])
    assert why == ("stage0.onnx loads only without them (in whatever words)" if graphs else None)


def test_what_can_not_be_loaded_at_all_says_why() -> None:
    def open_session(path: Path, options: Any, provider: Mapping[str, str]) -> str:
        raise PackageError(f"{len(provider)} options")

    backend = OnnxRuntimeGpuBackend.__new__(OnnxRuntimeGpuBackend)
    backend._cuda_graphs = True
    backend._open = open_session  # type: ignore[method-assign]
    with pytest.raises(PackageError, match=r"^0 options$"):
        backend._open_capturable(Path("stage0.onnx"), ort.SessionOptions(), {})
