"""Here the decoder has two layers: what holds of them holds of more, and it is compiled in half the time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from models.llama import build
from models.writer import save
from splitc.compiler import compile_model, plan_model
from tests import conftest
from tests.conftest import LAYER
from tests.helpers import feeds

DECODER = replace(conftest.DECODER, layers=2)
decoder_feeds = partial(feeds.decoder_feeds, layers=2)


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder of two layers with its weights beside it."""
    path = tmp_path_factory.mktemp("decoder") / "decoder.onnx"
    save(build(DECODER), path)
    return path


@pytest.fixture(scope="session")
def package(decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The decoder as a package of three stages."""
    path = tmp_path_factory.mktemp("package") / "decoder"
    compile_model(plan_model(decoder, ["3xcpu"], LAYER), path)
    return path
