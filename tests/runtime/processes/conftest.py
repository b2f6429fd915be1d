"""Fixtures of the tests of processes."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def as_users_start_them(plain_ranks: None) -> None:
    """Start processes as for users: starting is tested here."""
