"""Decoders whose masks are omitted if they hide nothing but later tokens, on fake GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from splitc.runtime import Session
from splitc.runtime.ranks.kept_recordings import NEW
from tests.compiler.caches.test_caches import OPTIMUM
from tests.compiler.caches.test_preamble import CLOSE, HALF, compiled
from tests.conftest import assert_close, run_whole
from tests.helpers.needs import needs_caches
from tests.helpers.written_decoder import feeds, following, without_states

pytestmark = [needs_caches, pytest.mark.usefixtures("gpus")]


@pytest.mark.parametrize("devices", [["cuda0"], ["cuda0", "cuda1"]])
def test_tokens_are_replayed_without_masks_and_with_them(tmp_path: Path, devices: list[str]) -> None:
    """A sequence with padding in its prompt has it in each token's mask. Each form is recorded separately."""
    style = replace(OPTIMUM, dtype=HALF)
    path = compiled(style, tmp_path, "layer", devices)
    spare = [f"cpu{number}" for number, _ in enumerate(devices)]
    with Session(path) as session, Session(path, devices=spare) as on_cpu:
        for padded in (0, 2, 0):
            before = session.metrics.replayed
            with session.start(24) as sequence, on_cpu.start(24) as other:
                request = feeds(style, 2, 4, 0, padded=padded)
                for _ in range(NEW + 6):
                    expected = run_whole(tmp_path / "model.onnx", request)
                    actual = sequence.run(without_states(request))
                    assert_close(actual, {"logits": expected["logits"]}, CLOSE)
                    assert_close(actual, other.run(without_states(request)), CLOSE)
                    request = following(style, expected, 2, 1, padded=padded)
            assert session.metrics.replayed - before >= 4
