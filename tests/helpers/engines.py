"""Engines that are made up by tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from splitc.runtime.engines.onnxruntime_cpu import OnnxRuntimeEngine


class FunctionEngine:
    """An engine that calls a function with its inputs, in order."""

    optional: frozenset[str] = frozenset()
    capture_blocker: str | None = None

    def __init__(self, inputs: Sequence[str], output: str, function: Callable[..., Any]) -> None:
        self.inputs, self.outputs, self._function = list(inputs), [output], function

    def run(self, values: Mapping[str, Any], into: Mapping[str, Any]) -> dict[str, Any]:
        return {self.outputs[0]: self._function(*(values[name] for name in self.inputs))}


def hold_engines(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Make engines on CPUs wait before they run. Returns events: one engine has begun, and all may continue."""
    begun, go_on = threading.Event(), threading.Event()
    run = OnnxRuntimeEngine.run

    def run_later(*args: Any, **options: Any) -> Any:
        begun.set()
        assert go_on.wait(10)
        return run(*args, **options)

    monkeypatch.setattr(OnnxRuntimeEngine, "run", run_later)
    return begun, go_on


def fail(*_: Any) -> Any:
    raise ValueError("out of memory")
