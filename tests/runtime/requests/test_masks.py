"""Masks of sequences whose caches have room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models import llama_fused
from models.writer import save
from splitc.compiler import compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.ranks.request import InFlightRequest
from splitc.runtime.requests import sequence as sequences
from tests.conftest import DECODER, LAYER, decoder_feeds, run_whole

ROOM = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fused")
    save(llama_fused.build(DECODER), folder / "model.onnx")
    compile_model(plan_model(folder / "model.onnx", ["cpu0"], LAYER), folder / "package")
    return folder


def steps(rows: int, tokens: list[int]) -> list[dict[str, Any]]:
    """Feeds of this number of tokens each, with masks of all tokens so far."""
    ids = np.arange(rows * sum(tokens)).reshape(rows, -1) % DECODER.vocabulary
    ends = np.cumsum(tokens)
    return [
        {"input_ids": ids[:, end - new : end], "attention_mask": np.ones((rows, end), np.int64)}
        for new, end in zip(tokens, ends, strict=True)
    ]


@pytest.mark.parametrize(("rows", "tokens"), [(1, [3, 1, 1, 2]), (2, [3, 1, 1])])
def test_requests_of_a_sequence_keep_their_sizes(
    rows: int, tokens: list[int], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = list[int]()

    def recorded(feeds: Any, *others: Any, **more: Any) -> InFlightRequest:
        lengths.append(feeds["attention_mask"].shape[1])
        return InFlightRequest(feeds, *others, **more)

    monkeypatch.setattr(sequences, "InFlightRequest", recorded)
    caches = {name: array for name, array in decoder_feeds(rows, 1, 0).items() if name.startswith("past")}
    with Session(model / "package", threads=1) as session, session.start(capacity=ROOM) as sequence:
        for feeds in steps(rows, tokens):
            expected = run_whole(model / "model.onnx", {**feeds, **caches})
            given = sequence.run(feeds)
            np.testing.assert_allclose(given["logits"], expected["logits"], rtol=0, atol=1e-5)
            caches = {name: expected[name.replace("past_key_values", "present")] for name in caches}
    # Several rows of a prompt are read as they are: kernels take them for nothing but a prompt.
    assert lengths == [3 if rows > 1 else ROOM, *[ROOM] * (len(tokens) - 1)]
