"""What a plan and a package say of replays, and `check` of several models."""

from __future__ import annotations

import pytest

from splitc.runtime.cli.check_command import Checked, print_checks
from splitc.runtime.cli.tables import replays_text
from splitc.runtime.hardware.memory_use import RankMemory
from splitc.runtime.package.states import State

IN_PLACE, LONGER, FIXED = State("k", "new_k", 2, True), State("v", "new_v", 2), State("h", "new_h")


def test_tokens_with_caches_that_get_longer_are_not_replayed() -> None:
    """Each token has another shape than the one before. Caches in place and recurrent states keep theirs."""
    assert replays_text("", [IN_PLACE, FIXED]) == "requests of known shapes: CUDA graphs"
    text = replays_text("", [IN_PLACE, LONGER, FIXED])
    assert text.endswith("; not tokens of a sequence: 1 cache is longer after each, 'v' first")
    assert replays_text("it has an If", [LONGER]) == "not replayed as CUDA graphs: it has an If"


def test_terms_of_memory_are_explained_once(capsys: pytest.CaptureFixture[str]) -> None:
    checked = Checked([], "cpu0", "", [RankMemory("cpu0", 3, 4, 1, 2, 5)], [])
    print_checks({"unet": checked, "vae": checked}, several=True)
    shown = capsys.readouterr().out
    assert (shown.count("unaccounted\n"), shown.count("loaded: weights")) == (2, 1)
