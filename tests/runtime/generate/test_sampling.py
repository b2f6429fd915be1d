"""Which token comes next."""

from __future__ import annotations

import numpy as np

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
