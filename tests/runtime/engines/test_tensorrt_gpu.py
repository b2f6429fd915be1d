"""TensorRT's engines on a GPU, with a fake library."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from splitc.runtime.engines.tensorrt_gpu import MOST_SHAPES, TensorrtEngine
from splitc.runtime.errors import EngineError


class FakeContext:
    """Takes all shapes but those of 13 rows, and fails with 7. The output has the input's shape."""

    def __init__(self) -> None:
        self.inferred = 0

    def set_tensor_address(self, name: str, pointer: int) -> None:
        pass

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shape = shape
        return shape[0] != 13

    def infer_shapes(self) -> list[str]:
        self.inferred += 1
        return []

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.shape

    def execute_async_v3(self, stream: int) -> bool:
        return self.shape[0] != 7


def load() -> tuple[TensorrtEngine, FakeContext]:
    context = FakeContext()
    modes = {"x": "INPUT", "y": "OUTPUT"}
    engine: Any = SimpleNamespace(
        num_io_tensors=2,
        get_tensor_name=["x", "y"].__getitem__,
        get_tensor_mode=modes.__getitem__,
        get_tensor_dtype=lambda name: "DataType.FLOAT",
        get_tensor_location=lambda name: "DEVICE",
        device_memory_size=0,
        create_execution_context_without_device_memory=lambda: context,
    )
    backend: Any = SimpleNamespace(
        trt=SimpleNamespace(TensorIOMode=SimpleNamespace(INPUT="INPUT"), TensorLocation=SimpleNamespace(HOST="HOST")),
        name="cuda0",
        stream=SimpleNamespace(ptr=0),
        download=dict,
        empty=lambda shape, dtype: SimpleNamespace(shape=shape, dtype=dtype, pointer=2),
        lend_scratch=lambda engine: None,
        keep=lambda arrays: None,
        said=lambda: "no kernel",
    )
    return TensorrtEngine("stage0.plan", engine, backend), context


def feeds(rows: int) -> Mapping[str, Any]:
    return {"x": SimpleNamespace(shape=(rows, 4), dtype="float32", pointer=1)}


def test_shapes_of_outputs_are_inferred_once_for_a_shape() -> None:
    engine, context = load()
    for rows in (2, 3, 2, 3):
        assert engine.run(feeds(rows))["y"].shape == (rows, 4)
    assert context.inferred == 2
    for rows in range(20, 20 + MOST_SHAPES):  # which are kept instead
        engine.run(feeds(rows))
    engine.run(feeds(2))
    assert context.inferred == 3 + MOST_SHAPES


@pytest.mark.parametrize(
    ("rows", "message"),
    [(13, r"stage0.plan was not built for the shape \(13, 4\) of 'x'"), (7, "stage0.plan failed on cuda0: no kernel")],
)
def test_engine_that_fails_says_why(rows: int, message: str) -> None:
    engine, _ = load()
    with pytest.raises(EngineError, match=message):
        engine.run(feeds(rows))
