"""Questions about images: the tokens of transformers' LLaVA. `make test-diffusers` runs this."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from splitc.runtime import MisuseError, Pipeline
from tests.helpers import llava
from tests.helpers.command import splitc

MOST = 16


@pytest.fixture(scope="module")
def model() -> Any:
    pytest.importorskip("torch")
    pytest.importorskip("PIL")
    pytest.importorskip("transformers")
    return llava.make_model()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llava.export(model, llava.make_processor(), tmp_path_factory.mktemp("llava") / "exported")


def expected(model: Any, folder: Path, images: list[Path], question: str) -> list[int]:
    """The greedy tokens of the unsplit model in transformers."""
    from PIL import Image
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": question}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    read = [Image.open(image).convert("RGB") for image in images]
    asked = processor(text=[text], images=read, return_tensors="pt")
    asked.pop("token_type_ids", None)  # which the class of the tokenizer adds and the model does not take
    made = model.generate(**asked, max_new_tokens=MOST, do_sample=False)[0, asked["input_ids"].shape[1] :].tolist()
    return [token for token in made if token != llava.END]


@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_tokens_are_those_of_transformers(model: Any, folder: Path, tmp_path: Path, mode: str) -> None:
    images = [llava.write_image(tmp_path / f"{seed}.png", seed) for seed in range(2)]
    splitc("compile", folder, "-o", tmp_path / "package", "-d", "2xcpu", "--split-mode", f"decoder_model_merged={mode}")
    answers = []
    for shown in ([images[0]], [images[1]], images):
        options = [word for image in shown for word in ("--image", image)]
        asked = ("--prompt", "w5 w6 w7", "-n", MOST, "--json")
        answers.append(json.loads(splitc("generate", tmp_path / "package", *options, *asked).stdout)["tokens"])
        assert answers[-1] == expected(model, folder, shown, "w5 w6 w7")
    assert answers[0] != answers[1], "the image matters"
    with Pipeline(tmp_path / "package") as pipeline:
        tokens = list(pipeline.generate(images=[images[0]], question="w5 w6 w7", max_new_tokens=MOST))
        assert tokens == answers[0]
        (tmp_path / "text.png").write_text("no image")
        with pytest.raises(MisuseError, match=r"can't read the image .*text\.png"):
            list(pipeline.generate(images=[tmp_path / "text.png"], question="w5"))
        with pytest.raises(MisuseError, match="no such image"):
            list(pipeline.generate(images=[tmp_path / "none.png"], question="w5"))
