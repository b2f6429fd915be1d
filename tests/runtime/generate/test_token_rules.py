"""Rules of generation configs, and the tokens that decoders begin with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from splitc.runtime.errors import MisuseError
from splitc.runtime.generate.package_configs import understood
from splitc.runtime.generate.token_rules import find_prompt, read_rules

LOGITS = np.array([5.0, 4.0, 3.0, 2.0, 1.0, -1.0], np.float32)
SPEECH = {
    "decoder_start_token_id": 10,
    "lang_to_id": {"<|en|>": 11, "<|de|>": 12},
    "task_to_id": {"transcribe": 14, "translate": 15},
    "no_timestamps_token_id": 16,
}


def order(config: dict[str, Any], tokens: list[int], prompt: int = 1, most: int = 9) -> list[int]:
    """The permitted tokens, the likeliest first."""
    changed = read_rules(config, prompt, most, [0])(LOGITS, tokens)
    return [int(token) for token in np.argsort(-changed, kind="stable") if np.isfinite(changed[token])]


@pytest.mark.parametrize(
    ("config", "tokens", "permitted"),
    [
        ({}, [7], [0, 1, 2, 3, 4, 5]),
        ({"suppress_tokens": [0, 2]}, [7, 8], [1, 3, 4, 5]),
        ({"begin_suppress_tokens": [1]}, [7], [0, 2, 3, 4, 5]),
        ({"begin_suppress_tokens": [1]}, [7, 8], [0, 1, 2, 3, 4, 5]),
        ({"forced_bos_token_id": 3}, [7], [3]),
        ({"forced_eos_token_id": 4}, [7] * 8, [4]),
        ({"forced_eos_token_id": [4]}, [7] * 7, [0, 1, 2, 3, 4, 5]),
        ({"min_length": 4}, [7, 8], [1, 2, 3, 4, 5]),
        ({"min_new_tokens": 1}, [7, 8], [0, 1, 2, 3, 4, 5]),
        ({"bad_words_ids": [[2], [8, 1]]}, [7, 8], [0, 3, 4, 5]),
        ({"bad_words_ids": [[8, 1]]}, [7, 9], [0, 1, 2, 3, 4, 5]),
        ({"no_repeat_ngram_size": 2}, [1, 2, 1, 0, 1], [1, 3, 4, 5]),
        ({"no_repeat_ngram_size": 3}, [1, 2, 3, 1, 2], [0, 1, 2, 4, 5]),
        ({"no_repeat_ngram_size": -1}, [1, 1], [0, 1, 2, 3, 4, 5]),
        ({"repetition_penalty": 4.0}, [0, 5], [1, 2, 3, 0, 4, 5]),
        # As in transformers: a text may end, and the token after a forced one is the first.
        ({"bad_words_ids": [[0], [2]]}, [7, 8], [0, 1, 3, 4, 5]),
        ({"forced_bos_token_id": 3, "begin_suppress_tokens": [1]}, [7, 3], [0, 2, 3, 4, 5]),
    ],
)
def test_config_forbids_and_orders_tokens(config: dict[str, Any], tokens: list[int], permitted: list[int]) -> None:
    assert order(config, tokens) == permitted


def test_tokens_that_the_model_lacks() -> None:
    with pytest.raises(MisuseError, match="forces the token 6, and the model has 6 of them"):
        order({"forced_bos_token_id": 6}, [7])
    assert order({"repetition_penalty": 4.0}, [0, 70]) == [1, 2, 3, 0, 4, 5], "which may be the prompt's"
    with pytest.raises(MisuseError, match="can't understand a config: IndexError"), understood("a config"):
        find_prompt({**SPEECH, "lang_to_id": {"<|en|>": 99}}, None, None, lambda tokens: LOGITS)


def likely(tokens: list[int]) -> Any:
    """Logits in which German is likelier, and a token that is no language likeliest."""
    assert tokens == [10]
    return np.array([9.0] + [0.0] * 10 + [1.0, 2.0] + [0.0] * 9)


@pytest.mark.parametrize(
    ("config", "language", "task", "prompt"),
    [
        ({"decoder_start_token_id": 2}, None, None, [2]),
        ({"bos_token_id": 3}, None, None, [3]),
        ({"decoder_start_token_id": None, "bos_token_id": 3}, None, None, [3]),
        (SPEECH, "en", None, [10, 11, 14, 16]),
        (SPEECH, "<|de|>", "translate", [10, 12, 15, 16]),
        (SPEECH, None, None, [10, 12, 14, 16]),
        ({**SPEECH, "forced_decoder_ids": [[1, None], [2, 15]]}, None, None, [10, 12, 15, 16]),
        ({**SPEECH, "forced_decoder_ids": [[1, 11], [2, 15], [3, 16]]}, None, None, [10, 11, 15, 16]),
        ({**SPEECH, "forced_decoder_ids": [[1, 11], [2, 15]]}, "de", "transcribe", [10, 12, 14, 16]),
        ({"decoder_start_token_id": 10, "forced_decoder_ids": [[1, 16]]}, None, None, [10, 16]),
    ],
)
def test_decoder_prompt_follows_config_language_and_task(
    config: dict[str, Any], language: str | None, task: str | None, prompt: list[int]
) -> None:
    assert find_prompt(config, language, task, likely) == prompt


def test_prompts_that_can_not_be_made() -> None:
    with pytest.raises(MisuseError, match="decoder_start_token_id"):
        find_prompt({}, None, None, likely)
    with pytest.raises(MisuseError, match=r"--language fr: .* has de, en"):
        find_prompt(SPEECH, "fr", None, likely)
