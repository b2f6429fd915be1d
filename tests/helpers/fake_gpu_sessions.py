"""Sessions on simulated GPUs: a fixture, and packages for them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from splitc.compiler import Request, compile_model, plan_model
from tests.helpers.fake_gpus import install_cupy, make_backend


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulate GPUs, for ranks that are threads and for those that are processes."""
    install_cupy(monkeypatch.setattr)
    monkeypatch.setattr("splitc.runtime.ranks.loaded.make_backend", make_backend)
    monkeypatch.setattr("splitc.runtime.processes.device_processes.MAIN", "tests.helpers.fake_rank")
    yield


@cache
def package(model: Path, mode: str, ranks: int, **options: Any) -> Path:
    """A package beside its model, shared by the tests of this model. Sums are between engines, as fake GPUs need them.

    Nothing is fused: packages for CPU devices have caches in place of another form.
    """
    request = Request(split_mode=mode, spread=True, no_fuse=True, **options)
    place = model.with_name(f"{model.stem}-{mode}-{ranks}-{len(options)}")
    with patch("splitc.compiler.lowering.segments.has_collectives", lambda engine, devices: False):
        compile_model(plan_model(model, [f"{ranks}xcpu"], request), place, verify=False)
    return place
