"""Positions of several numbers a token, fed to a decoder. With transformers' own model: `make test-diffusers`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from splitc.runtime.errors import MisuseError
from splitc.runtime.generate.image_prompt import ImagePrompt, Positions, read_positions


def test_tokens_after_the_prompt_go_on_behind_the_image() -> None:
    prompt = np.array([[0, 1, 1, 2], [0, 1, 2, 3]])
    positions = Positions(prompt, -1)
    np.testing.assert_array_equal(positions.at(np.arange(4)[None]), prompt[:, None])
    np.testing.assert_array_equal(positions.at(np.arange(2, 6)[None]), [[[1, 2, 3, 4]], [[2, 3, 3, 4]]])


def test_without_a_config_they_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match=r"has no config\.json, by which transformers computes them"):
        read_positions(tmp_path, "decoder", ImagePrompt([1], 1, {}))
