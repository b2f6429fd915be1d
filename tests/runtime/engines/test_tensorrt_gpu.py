"""TensorRT's engines on a GPU, with a fake library."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from splitc.runtime.engines.tensorrt_gpu import MOST_GRAPHS, TensorrtEngine


class FakeStream:
    """Counts captures."""

    ptr = 0

    def __init__(self) -> None:
        self.captures = 0

    def begin_capture(self, mode: int) -> None:
        self.captures += 1

    def end_capture(self) -> Any:
        return SimpleNamespace(launch=lambda stream: None)


def load(replays: bool) -> tuple[TensorrtEngine, FakeStream]:
    context = SimpleNamespace(execute_async_v3=lambda stream: True)
    engine: Any = SimpleNamespace(
        num_io_tensors=0, device_memory_size=0, create_execution_context_without_device_memory=lambda: context
    )
    runtime = SimpleNamespace(streamCaptureModeThreadLocal=0, CUDARuntimeError=RuntimeError)
    backend: Any = SimpleNamespace(
        trt=SimpleNamespace(),
        cuda=SimpleNamespace(runtime=runtime),
        stream=(stream := FakeStream()),
        tape=None,
        cuda_graphs=True,
    )
    return TensorrtEngine("stage0.plan", engine, backend, replays), stream


@pytest.mark.parametrize("replays", [True, False])
def test_engine_with_control_flow_is_never_captured(replays: bool) -> None:
    """A CUDA graph has only the branch that one request took."""
    engine, stream = load(replays)
    for _ in range(3):
        engine._launch("key", lambda: None)
    assert stream.captures == replays


def test_second_run_is_captured_after_many_others() -> None:
    engine, stream = load(replays=True)
    for key in (*range(2 * MOST_GRAPHS, MOST_GRAPHS, -1), 3, 2, 1, 3):
        engine._launch(key, lambda: None)
    assert stream.captures == 1
