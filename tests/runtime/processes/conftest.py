"""What the tests of processes share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def as_users_start_them(plain_ranks: None) -> None:
    """Here the start is what is tested."""
