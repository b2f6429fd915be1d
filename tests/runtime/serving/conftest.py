"""Fixtures of several tests of servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitc.compiler import Request, compile_model, plan_model


@pytest.fixture(scope="module")
def package(decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three stages, whose engines take what the model does."""
    path = tmp_path_factory.mktemp("package") / "decoder"
    request = Request(split_mode="layer", no_fuse=True)
    compile_model(plan_model(decoder, ["3xcpu"], request), path, verify=False)
    return path


@pytest.fixture(scope="module")
def slotted(decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The decoder, with slots."""
    folder = tmp_path_factory.mktemp("slotted") / "decoder"
    compile_model(
        plan_model(decoder, "2xcpu", Request(split_mode="layer", no_fuse=True, lora_slots=4)), folder, verify=False
    )
    return folder
