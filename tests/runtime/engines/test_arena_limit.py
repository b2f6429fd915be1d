"""Requests beyond a budget, or beyond what a container has free."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.engines import arena_limit
from splitc.runtime.errors import EngineError
from tests.conftest import decoder_feeds

SMALL, LARGE = decoder_feeds(batch=1, new=2, past=4), decoder_feeds(batch=64, new=64, past=64)


@pytest.mark.parametrize("ranks", ["threads", "processes"])
@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_request_beyond_the_budget_fails_alone(decoder: Path, tmp_path: Path, mode: str, ranks: str) -> None:
    shapes = {name: value.shape for name, value in SMALL.items()}
    plan = plan_model(decoder, ["2xcpu"], Request(split_mode=mode, memory=["20MiB"], shapes=shapes))
    compile_model(plan, tmp_path / "package")
    with Session(tmp_path / "package", ranks=ranks) as session:
        expected = session.run(SMALL)
        for _ in range(2):
            with pytest.raises(EngineError, match=r"more memory than the budget leaves: .* may take 7\.\d+ MiB, and"):
                session.run(LARGE)
            for name, value in session.run(SMALL).items():
                np.testing.assert_array_equal(value, expected[name])


def test_without_a_budget_there_is_no_limit(decoder: Path, tmp_path: Path) -> None:
    compile_model(plan_model(decoder, ["cpu0"], Request(split_mode="layer")), tmp_path / "package")
    with Session(tmp_path / "package") as session:
        assert session.manifest.ranks[0].limit_bytes is None
        assert session.run(LARGE)["logits"].shape[0] == 64


def test_containers_bound_engines(decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_model(plan_model(decoder, ["cpu0"], Request(split_mode="layer")), tmp_path / "package")
    monkeypatch.setattr(arena_limit, "memory_limit", lambda: (1 << 30, 10 << 20))
    with Session(tmp_path / "package") as session:
        session.run(SMALL)
        with pytest.raises(EngineError, match=r"may take 10\.0 MiB"):
            session.run(LARGE)
        session.run(SMALL)
