"""The output of the command generate, also when something fails."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from models.llama import Size, build
from models.writer import save
from splitc.compiler import compile_model, plan_model
from splitc.runtime.cli.app import app
from splitc.runtime.errors import EngineError, MisuseError
from splitc.runtime.files.explained import Interrupted
from splitc.runtime.generate.conversation import Conversation
from tests.conftest import LAYER

SMALL = Size(layers=2, hidden=64, heads=4, kv_heads=2, feed_forward=96, vocabulary=50)


def generate(package: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["generate", str(package), "--prompt-ids", "5,17,33", *options])


@pytest.fixture
def narrow(tmp_path: Path) -> Path:
    """A package with room for 8 tokens."""
    save(build(replace(SMALL, capacity=8)), tmp_path / "model.onnx")
    compile_model(plan_model(tmp_path / "model.onnx", ["2xcpu"], LAYER), tmp_path / "package")
    return tmp_path / "package"


@pytest.mark.parametrize(
    ("raised", "message", "code"),
    [(EngineError("on purpose"), "on purpose", 1), (KeyboardInterrupt(), "interrupted", 130)],
)
def test_tokens_before_a_failure_are_kept(
    package: Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException, message: str, code: int
) -> None:
    whole = json.loads(generate(package, "-n", "4", "--json").stdout)
    read = Conversation.read

    def fail(self: Conversation, new: Any) -> Any:
        if len(self._tokens) == 6:
            raise raised
        return read(self, new)

    monkeypatch.setattr(Conversation, "read", fail)
    as_json = generate(package, "-n", "8", "--json")
    found = json.loads(as_json.stdout)
    assert (found["tokens"], found["ended"], found["error"]) == (whole["tokens"], "error", message)
    assert isinstance(as_json.exception, (EngineError, Interrupted))
    assert as_json.exception.exit_code == code
    assert generate(package, "-n", "8").stdout == " ".join(map(str, whole["tokens"])) + " \n"
    assert (whole["ended"], "error" in whole) == ("limit", False)


def test_the_end_is_said(narrow: Path) -> None:
    """Without a limit, generation ends when the room is full; a limit beyond the room is refused."""
    found = generate(narrow)
    assert len(found.stdout.split()) == 6
    assert "the model has room for no more than 8 tokens" in found.stderr
    as_json = json.loads(generate(narrow, "--json").stdout)
    assert (len(as_json["tokens"]), as_json["ended"]) == (6, "room")
    stopped = json.loads(generate(narrow, "--json", "--stop", str(as_json["tokens"][0])).stdout)
    assert (stopped["tokens"], stopped["ended"]) == ([], "stop")
    refused = generate(narrow, "--json", "-n", "7")
    assert isinstance(refused.exception, MisuseError)
    assert refused.stdout == ""
