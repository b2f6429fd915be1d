"""Fixtures of the tests of processes."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def ranks_are_the_new_children(children_of_sessions: None) -> None:
    """Tests here compare this process's children."""
