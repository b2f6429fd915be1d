"""Adapters of a pipeline on a package, by diffusers' calls: here without diffusers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.integrations.diffusers_adapters import PackageAdapters, with_scaled_prompt
from tests.helpers.adapters import random_pairs, write_peft
from tests.helpers.feeds import LAYERS

SIZES = {f"model.layers.{layer}.self_attn.q_proj": (64, 64) for layer in range(LAYERS)}


class Drawing(PackageAdapters):
    """A pipeline of one model, which says what its adapters were when its prompt was encoded."""

    def __init__(self, session: Session) -> None:
        self.components = {"text_encoder": SimpleNamespace(sessions={"forward": session})}
        self.used: dict[str, float] = {}

    def encode_prompt(self, prompt: str, lora_scale: float | None = None, clip_skip: int = 0) -> None:
        assert lora_scale is None and clip_skip == 2
        self.used = dict(self.components["text_encoder"].sessions["forward"].adapters.used)
        if not prompt:
            raise ValueError("nothing")

    encode_prompt = with_scaled_prompt(encode_prompt)


@pytest.fixture(scope="module")
def package(decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawing") / "package"
    compile_model(plan_model(decoder, "2xcpu", Request(split_mode="layer", lora_slots=4)), folder, verify=False)
    return folder


@pytest.fixture
def drawing(package: Path, tmp_path: Path) -> Any:
    with Session(package) as session:
        drawing = Drawing(session)
        for name in ("style", "pose"):
            session.adapters.load(name, write_peft(tmp_path / name, random_pairs(SIZES, 4)))
        drawing.set_adapters(["style", "pose"], [1.0, -0.5])
        yield drawing


def test_prompts_are_encoded_with_scaled_adapters(drawing: Any) -> None:
    """For one call, whatever becomes of it."""
    session = drawing.components["text_encoder"].sessions["forward"]
    for scale, times in ((0.5, 0.5), (None, 1.0), (0.0, 0.0)):
        drawing.encode_prompt("a cat", scale, 2)
        assert drawing.used == {"style": times, "pose": -0.5 * times}
        assert session.adapters.used == {"style": 1.0, "pose": -0.5}
    with pytest.raises(ValueError, match="nothing"):
        drawing.encode_prompt("", lora_scale=3.0, clip_skip=2)
    assert drawing.used["style"] == 3.0 and session.adapters.used == {"style": 1.0, "pose": -0.5}


def test_adapters_are_switched_off_and_on(drawing: Any) -> None:
    """With the same strengths, those that are still loaded; not if others were set since."""
    session = drawing.components["text_encoder"].sessions["forward"]
    drawing.enable_lora()  # they are on
    assert session.adapters.used == {"style": 1.0, "pose": -0.5}
    for _ in range(2):
        drawing.disable_lora()
        assert not session.adapters.used and list(session.adapters) == ["style", "pose"]
    drawing.delete_adapters("style")
    for _ in range(2):
        drawing.enable_lora()
        assert session.adapters.used == {"pose": -0.5}
    drawing.disable_lora()
    drawing.set_adapters("pose", 0.25)
    drawing.enable_lora()
    assert session.adapters.used == {"pose": 0.25}
    drawing.disable_lora()
    drawing.unload_lora_weights()
    drawing.enable_lora()
    assert not session.adapters.used
