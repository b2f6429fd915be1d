"""Which kernels attention uses."""

from __future__ import annotations

import os

import pytest

from splitc.runtime.engines.attention_kernels import CUDNN, XQA, attention_for


@pytest.fixture(autouse=True)
def user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who has chosen nothing."""
    for name in (CUDNN, XQA):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("known_shapes", [False, True])
def test_what_has_to_plan_is_for_known_shapes(known_shapes: bool) -> None:
    with attention_for(known_shapes) as options:
        assert os.environ[XQA] == "0"
        assert bool(int(options["sdpa_kernel"]) & 8) == known_shapes
    assert XQA not in os.environ


@pytest.mark.parametrize("name", [CUDNN, XQA])
def test_what_the_user_chose_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "0")
    with attention_for(True) as options:
        assert options == {}
    assert os.environ[name] == "0"


def test_a_session_that_can_not_be_made_leaves_nothing() -> None:
    with pytest.raises(ValueError, match="no"), attention_for(False):
        raise ValueError("no")
    assert XQA not in os.environ
