"""`splitc compile --export`: optimum exports a model first. `make test-diffusers` runs what needs optimum."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from splitc.runtime.integrations.transformers import load
from tests.helpers.command import splitc


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A small model of transformers with random weights."""
    pytest.importorskip("optimum.exporters.onnx")
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=200,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize("weights", ["copy", "link"])
def test_tokens_are_those_of_the_model_itself(llama: Path, tmp_path: Path, weights: str) -> None:
    import torch
    import transformers

    options = ("-d", "2xcpu", "--split-mode", "layer", "--weights", weights, "--json")
    shown = splitc("compile", "--export", llama, "-o", tmp_path / "package", *options).stdout
    assert json.loads(shown), "what optimum prints is no result"
    assert {path.name for path in tmp_path.iterdir()} == {"llama", "package"}, "what was exported is deleted"
    own, whole = load(tmp_path / "package"), transformers.LlamaForCausalLM.from_pretrained(llama)
    ids = torch.tensor([[5, 17, 33, 2, 90]])
    tokens = [
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        for model in (own, whole)
    ]
    own.session.session.close()
    assert torch.equal(*tokens) and tokens[0].shape[1] > 6


def test_model_that_can_not_be_exported(tmp_path: Path) -> None:
    pytest.importorskip("optimum.exporters.onnx")
    (tmp_path / "nothing").mkdir()
    said = splitc("compile", "--export", tmp_path / "nothing", "-o", tmp_path / "package", "-d", "2xcpu", code=1).stderr
    assert f"optimum can't export {tmp_path / 'nothing'}: " in " ".join(said.split())
    assert [path.name for path in tmp_path.iterdir()] == ["nothing"]


def with_exporter(monkeypatch: pytest.MonkeyPatch, export: Any) -> None:
    """Replace optimum by a fake."""
    for name in ("optimum", "optimum.exporters", "optimum.exporters.onnx"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    if export is not None:
        monkeypatch.setattr(sys.modules["optimum.exporters.onnx"], "main_export", export, raising=False)


def test_without_optimum_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_exporter(monkeypatch, None)
    said = splitc("compile", "--export", "gpt2", "-o", tmp_path / "package", "-d", "2xcpu", code=2).stderr
    assert "--export needs optimum's exporter: pip install optimum-onnx" in said
    assert not list(tmp_path.iterdir())


def test_nothing_is_exported_where_the_package_can_not_be(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_exporter(monkeypatch, lambda *_, **__: pytest.fail("it takes minutes"))
    said = splitc("compile", "--export", "gpt2", "-o", package, "-d", "2xcpu", code=2).stderr
    assert "exists already" in said
