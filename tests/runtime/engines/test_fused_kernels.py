"""Kernels of fused operators that can't be compiled: the GPU runs their functions, and a note says why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from splitc.runtime.engines import fused_kernels
from splitc.runtime.engines.fused_kernels import compile_fused
from tests.runtime.package.test_fused import RIGHT


def gpu(failure: Exception | None = None) -> Any:
    def module(code: str) -> object:
        assert RIGHT.name in code
        raise failure or AssertionError

    return SimpleNamespace(name="cuda1", notes=[], cupy=SimpleNamespace(RawModule=module))


def test_a_note_says_that_kernels_do_not_compile() -> None:
    device = gpu(RuntimeError("there is no NVRTC"))
    assert compile_fused(device, [RIGHT]) is None
    assert device.notes == ["cuda1 runs 1 fused operators node by node: there is no NVRTC"]


def test_nothing_is_compiled_without_operators_or_library(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compile_fused(gpu(), []) is None
    monkeypatch.setattr(fused_kernels, "is_built", lambda: False)
    device = gpu()
    assert compile_fused(device, [RIGHT]) is None
    assert device.notes == []
