"""The contents of folders for onnxruntime-genai."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.request.places import Place
from splitc.runtime.errors import MisuseError
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.package.states import State
from splitc.runtime.serving.genai_folder import CacheNames, _group, find_caches
from tests.helpers.command import splitc
from tests.helpers.feeds import LAYERS
from tests.helpers.folders import write_json
from tests.helpers.needs import needs_caches
from tests.helpers.packages import compile_mode


def read_config(folder: Path) -> Any:
    return json.loads((folder / "genai_config.json").read_text())


def test_stages_are_a_pipeline(package: Path, tmp_path: Path) -> None:
    splitc("export", "genai", package, "-o", tmp_path / "genai", "--stop", 2, "--context", 128)
    model = read_config(tmp_path / "genai")["model"]
    decoder = model["decoder"]
    assert (model["type"], model["eos_token_id"], model["context_length"]) == ("decoder-pipeline", [2], 128)
    assert (decoder["num_hidden_layers"], decoder["num_key_value_heads"], decoder["head_size"]) == (LAYERS, 2, 16)
    assert decoder["inputs"]["past_key_names"] == "past_key_values.%d.key"
    assert decoder["outputs"]["present_value_names"] == "present.%d.value"
    known = set(read_manifest(package).inputs[0].name.split()) | {each.name for each in read_manifest(package).inputs}
    for stage in (stage for each in decoder["pipeline"] for stage in each.values()):
        file = tmp_path / "genai" / stage["filename"]
        assert file.stat().st_ino == (package / stage["filename"]).stat().st_ino, "the same files"
        session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        assert {each.name for each in session.get_inputs()} == set(stage["inputs"]) <= known
        known |= set(stage["outputs"])
    assert "logits" in known


def test_own_config_stays(package: Path, tmp_path: Path) -> None:
    """Only the model is changed in it; the tokenizer goes with it."""
    own = {"model": {"type": "llama", "decoder": {"filename": "model.onnx", "head_size": 8}}, "search": {"top_k": 3}}
    write_json(tmp_path / "model" / "genai_config.json", own)
    write_json(tmp_path / "model" / "tokenizer.json", {})
    (tmp_path / "model" / "model.onnx").write_bytes(b"the unsplit one")
    splitc("export", "genai", package, "-o", tmp_path / "genai", "--tokenizer", tmp_path / "model")
    config = read_config(tmp_path / "genai")
    assert config["search"] == own["search"] and config["model"]["decoder"]["head_size"] == 8
    assert [*config["model"]["decoder"]] == ["head_size", "pipeline"]
    assert json.loads((tmp_path / "model" / "genai_config.json").read_text()) == own
    assert (tmp_path / "genai" / "tokenizer.json").exists() and not (tmp_path / "genai" / "model.onnx").exists()
    options = ("-o", tmp_path / "other", "--tokenizer", tmp_path / "model", "--stop", 2)
    assert "--stop has no effect beside the model's own" in splitc("export", "genai", package, *options, code=2).stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "needs the token that ends a text"),
        (["--stop", "96"], "the end token 96 is none of the model's tokens: they are 0 to 95"),
        (["--stop", "2", "--threads", "1"], "--threads has no effect with 'genai'"),
        (["--tokenizer", "nowhere"], "no such tokenizer: nowhere"),
        (["--tokenizer", __file__], "is not a folder"),
    ],
)
def test_what_is_missing_or_wrong_is_said(package: Path, tmp_path: Path, options: list[str], said: str) -> None:
    assert said in splitc("export", "genai", package, "-o", tmp_path / "genai", *options, code=2).stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["[]", "{}", '{"model": []}', '{"model": {"decoder": 1}}'])
def test_config_of_another_model_is_said(package: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "genai_config.json").write_text(content, encoding="utf-8")
    options = ["-o", tmp_path / "genai", "--tokenizer", tmp_path / "tokenizer"]
    found = splitc("export", "genai", package, *options, code=2)
    assert "genai_config.json " in found.stderr, "has no decoder, or is no object"


@needs_caches
def test_caches_in_place_are_not_the_servers(decoder: Path, tmp_path: Path) -> None:
    """Such engines take the cache's length, which only this runtime feeds."""
    compile_model(plan_model(decoder, ["2xcpu"], Request(split_mode="layer")), tmp_path / "package")
    found = splitc("export", "genai", tmp_path / "package", "-o", tmp_path / "genai", "--stop", 2, code=2)
    assert "its engines take 'splitc.past' too: compile with --no-fuse" in found.stderr
    assert not (tmp_path / "genai").exists()


def test_ranks_that_work_together_are_no_stages(decoder: Path, tmp_path: Path) -> None:
    package = compile_mode(decoder, "tensor")
    found = splitc("export", "genai", package, "-o", tmp_path / "genai", "--stop", 2, code=2)
    assert "tensor mode ranks work on a stage together: compile with --split-mode layer" in found.stderr


def test_ranks_with_placed_weights_are_no_stages(decoder: Path, tmp_path: Path) -> None:
    request = Request(split_mode="layer", place=[Place("mlp", "cpu1")], no_fuse=True)
    compile_model(plan_model(decoder, ["2xcpu"], request), tmp_path / "package", verify=False)
    found = splitc("export", "genai", tmp_path / "package", "-o", tmp_path / "genai", "--stop", 2, code=2)
    assert "ranks take turns within a stage, for weights that are placed: compile without these" in found.stderr


def test_caches_are_found_by_their_numbers(package: Path) -> None:
    manifest = read_manifest(package)
    names = ("past_key_values.%d.key", "past_key_values.%d.value")
    assert find_caches(manifest) == CacheNames(names, ("present.%d.key", "present.%d.value"), LAYERS, 2, 16)


def test_layer_is_the_number_that_differs() -> None:
    states = [State(f"v2.{part}{layer}", f"out.v2.{part}{layer}") for layer in range(3) for part in "kv"]
    assert _group(states) == {(f"v2.{part}%d", f"out.v2.{part}%d"): {0, 1, 2} for part in "kv"}
    with pytest.raises(MisuseError, match="needs the layer's number in the names of a cache: 'h', 'hn'"):
        _group([State("h", "hn")])
