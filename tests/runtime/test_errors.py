"""How errors name options."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitc.compiler import Request, plan_model
from splitc.runtime import errors
from splitc.runtime.errors import MisuseError, SplitcError, named, typed_options


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_are_typed", False)


@pytest.mark.usefixtures("in_python")
@pytest.mark.parametrize(
    ("typed", "called"),
    [
        ("--split-mode layer needs -d", "split_mode layer needs devices"),
        ("(--set, --no-state, --trust-external-data)", "(settings, no_state, trust_external_data)"),
        ("well-known a--b x-d -dx ---", "well-known a--b x-d -dx ---"),
    ],
)
def test_python_has_its_own_names(typed: str, called: str) -> None:
    error = SplitcError(typed)
    assert str(error) == called
    with typed_options():
        assert str(error) == typed
        assert str(named(error, "vae")) == f"module 'vae': {typed}"
    assert str(error) == called


@pytest.mark.usefixtures("in_python")
def test_a_request_is_told_of_its_fields(decoder: Path) -> None:
    with pytest.raises(MisuseError, match=r"^shapes names 'ids', and the model has no such input"):
        plan_model(decoder, ["cpu0"], Request(shapes={"ids": (1, 2)}))
