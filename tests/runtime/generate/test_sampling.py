"""The choice of the next token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from splitc.runtime.errors import EngineError, MisuseError
from splitc.runtime.generate.sampling import Sampling, choose_token


def test_sampling_follows_the_chances() -> None:
    generator = np.random.default_rng(0)
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    drawn = [choose_token(logits, Sampling(temperature=1.0), generator) for _ in range(4000)]
    np.testing.assert_allclose(np.bincount(drawn) / 4000, [0.5, 0.3, 0.15, 0.05], atol=0.03)
    assert {choose_token(logits, Sampling(temperature=1.0, top_k=2), generator) for _ in range(200)} == {0, 1}
    assert {choose_token(logits, Sampling(temperature=1.0, top_p=0.6), generator) for _ in range(200)} == {0, 1}
    assert {choose_token(logits, Sampling(temperature=1.0, top_p=0.4), generator) for _ in range(200)} == {0}
    assert choose_token(logits, Sampling(), generator) == 0


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_that_are_no_numbers_are_said(temperature: float) -> None:
    generator, sampling = np.random.default_rng(0), Sampling(temperature=temperature)
    with pytest.raises(EngineError, match=r"not a number \(NaN\) for the token 1"):
        choose_token(np.array([2, np.nan, 1], np.float16), sampling, generator)
    with pytest.raises(EngineError, match="no token may come next"):
        choose_token(np.full(3, -np.inf, np.float32), sampling, generator)
    assert choose_token(np.array([2, np.inf, -np.inf], np.float32), sampling, generator) == 1


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"temperature": "0.7"}, "temperature '0.7': it is 0 .the likeliest token. or more"),
        ({"temperature": float("nan")}, "temperature nan: it is 0"),
        ({"top_p": 0}, "top-p 0: it is above 0 and at most 1"),
        ({"top_k": 2.5}, "top-k 2.5: it is a number of tokens .0: all. from 0 on"),
        ({"seed": None}, "seed None: it is a number from 0 on"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(MisuseError, match=message):
        Sampling(**numbers)
