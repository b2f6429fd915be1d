"""A tokenizer with a word for each token, and a chat template."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from tests.conftest import DECODER
from tests.helpers.folders import write_json

USER, ANSWER, END = 60, 61, 95
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}w60 {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}w61{% endif %}"
)


def write_chat_tokenizer(folder: Path) -> Path:
    """Write the tokenizer into the folder, with configs."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(DECODER.vocabulary)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"chat_template": TEMPLATE, "eos_token": f"w{END}"})
    write_json(folder / "generation_config.json", {"eos_token_id": END, "temperature": 0.5})
    return folder


def words(tokens: list[int]) -> str:
    """The text of tokens."""
    return " ".join(f"w{token}" for token in tokens)
