"""Here the decoder has two layers: what holds of them holds of more, and it is compiled in half the time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests import conftest
from tests.helpers import feeds

DECODER = replace(conftest.DECODER, layers=2)
decoder_feeds = partial(feeds.decoder_feeds, layers=2)


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder of two layers with its weights beside it."""
    return conftest.saved(DECODER, tmp_path_factory)


@pytest.fixture(scope="session")
def package(decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The decoder as a package of three stages."""
    return conftest.in_three_stages(decoder, tmp_path_factory)
