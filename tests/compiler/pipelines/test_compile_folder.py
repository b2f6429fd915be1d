"""Packages of folders, compiled and checked from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from models.writer import save
from splitc.compiler import Request, compile_pipeline, plan_pipeline
from splitc.runtime import Pipeline, Session
from splitc.runtime.package.manifest import MergedAdapter
from splitc.runtime.package.pipeline_file import read_pipeline
from tests.conftest import assert_close, run_whole
from tests.helpers.adapters import random_pairs, write_peft
from tests.helpers.command import splitc
from tests.helpers.folders import diffusers_feeds, diffusers_folder, image_decoder, text_encoder, write_decoders

MODES = "unet=layer,text_encoder=tensor"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return diffusers_folder(tmp_path_factory.mktemp("diffusers"))


@pytest.fixture(scope="module")
def package(folder: Path) -> Path:
    path = folder.with_name("package")
    compile_pipeline(plan_pipeline(folder, ["2xcpu"], Request(split_mode=MODES)), path)
    return path


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def said(*arguments: object, code: int) -> str:
    return " ".join(splitc(*arguments, code=code).stderr.split())


def test_modules_give_what_their_models_give(folder: Path, package: Path) -> None:
    with Pipeline(package, threads=1) as opened:
        assert {name: session.manifest.split_mode for name, session in opened.items()} == {
            "text_encoder": "tensor",
            "unet": "layer",
            "vae_decoder": "layer",
        }
        for name, feeds in diffusers_feeds().items():
            assert_close(opened[name].run(feeds), run_whole(folder / name / "model.onnx", feeds))


def test_each_module_that_fails_is_named(tmp_path: Path) -> None:
    """The others are still tried, and nothing is written."""
    odd = ir.from_onnx_text(
        """<ir_version: 8, opset_import: ["" : 17]>
        odd (string[n] x, float[n] y) => (string[n] z, float[n] w) { z = Identity (x) w = Neg (y) }"""
    )
    for name in ("first", "last"):
        (tmp_path / "folder" / name).mkdir(parents=True)
        ir.save(odd, tmp_path / "folder" / name / "model.onnx")
    save(image_decoder().model(), tmp_path / "folder" / "middle" / "model.onnx")
    text = said("compile", tmp_path / "folder", "-o", tmp_path / "package", "-d", "cpu0", code=1)
    assert "module 'first': the input 'x' is of type STRING" in text
    assert "module 'last': the input 'x' is of type STRING" in text
    assert not (tmp_path / "package").exists()


def test_files_travel_to_where_they_were(folder: Path, package: Path) -> None:
    pipeline = read_pipeline(package)
    assert pipeline is not None
    assert [module.source for module in pipeline.modules] == [
        f"{name}/model.onnx" for name in ("text_encoder", "unet", "vae_decoder")
    ]
    for file in pipeline.files:
        assert (package / file.path).read_bytes() == (folder / file.path).read_bytes()
    assert "tokenizer/tokenizer_config.json" in files(package)
    assert not [name for name in files(package) if "safetensors" in name or "cache" in name]


def test_plan_comes_back_from_its_file(folder: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    shown = splitc("plan", folder, "-d", "2xcpu", "--split-mode", MODES, "-o", plan).stdout
    assert "text_encoder, tensor" in shown
    assert "all together" in shown
    assert "left out: unet/diffusion_pytorch_model.safetensors, 16 B: weights in another format" in shown
    content = json.loads(plan.read_text())
    assert content["modules"]["unet"]["plan"]["blocks"]["blocks.1"] == 0
    plan.write_text(plan.read_text().replace('"blocks.1": 0', '"blocks.1": 1'))
    made = splitc("compile", folder, "--plan", plan, "-o", tmp_path / "package", "--json").stdout
    assert json.loads(made)["modules"]["unet"]["plan"]["blocks"]["blocks.1"] == 1
    blocks = json.loads(splitc("inspect", tmp_path / "package", "--module", "unet", "--json").stdout)["ranks"][1]
    assert blocks["blocks"][0] == "blocks.1"
    assert "-d has no effect with" in said(
        "compile", folder, "--plan", plan, "-o", tmp_path / "p", "-d", "cpu0", code=2
    )
    model = folder / "unet" / "model.onnx"
    assert "is the plan of a folder of models" in said("compile", model, "--plan", plan, "-o", tmp_path / "p", code=2)
    content["devices"]["cpu0"]["budget_bytes"] = 1000
    plan.write_text(json.dumps(content))
    assert "of cpu0 together, which may use 0.98 KiB" in said(
        "compile", folder, "--plan", plan, "-o", tmp_path / "p", code=3
    )
    modules = {("../unet" if name == "unet" else name): module for name, module in content["modules"].items()}
    for message, edited in (
        ("names '../secret', which leads out of its folder", {**content, "files": [*content["files"], "../secret"]}),
        ("names '../unet', which leads out of its folder", {**content, "modules": modules}),
        ("has no modules", {**content, "modules": {}}),
    ):
        plan.write_text(json.dumps(edited))
        assert message in said("compile", folder, "--plan", plan, "-o", tmp_path / "p", code=2)


def test_check_compares_each_module_with_its_own_model(folder: Path, package: Path, tmp_path: Path) -> None:
    shown = splitc("check", package, "--model", folder, "--no-memory").stdout
    assert "3 of 3 outputs agree in 3 modules" in shown
    one = splitc("check", package, "--model", folder, "--module", "unet", "--no-memory").stdout
    assert "1 of 1 outputs agree with model.onnx" in one
    other = diffusers_folder(tmp_path / "other")
    model = image_decoder().model()
    model.graph.initializers["last"].const_value = ir.tensor(np.ones((3, 8, 1, 1), np.float32), name="last")
    save(model, other / "vae_decoder" / "model.onnx")
    differs = splitc("check", package, "--model", other, "--no-memory", code=4)
    assert "1 of 3 outputs differ beyond tolerance: vae_decoder.sample" in differs.stderr
    (other / "unet" / "model.onnx").unlink()
    assert "no such model file" in said("check", package, "--model", other, code=2)
    assert "--fill is for one model" in said("check", package, "--model", folder, "--fill", "sample=ones", code=2)


def test_equal_weights_are_one_file(tmp_path: Path) -> None:
    write_decoders(tmp_path / "models")
    splitc("compile", tmp_path / "models", "-d", "cpu0", "-o", tmp_path / "package")
    first, second = (tmp_path / "package" / name / "rank0" / "stage0.weights" for name in decoders())
    assert first.samefile(second)
    checked = splitc("check", tmp_path / "package", "-m", tmp_path / "models", "--no-memory").stdout
    assert "2 of 2 outputs agree" in checked


def decoders() -> list[str]:
    return ["decoder_model", "decoder_with_past_model"]


def test_uses_of_one_file_are_modules(tmp_path: Path) -> None:
    write_decoders(tmp_path / "models")
    merged = tmp_path / "models" / "decoder_model_merged.onnx"
    compiled = ["compile", tmp_path / "models", "-d", "2xcpu", "--module", "decoder_model_merged"]
    modes = ("--split-mode", "decoder_model=row,decoder_with_past_model=layer", "--row-min", 8)
    splitc(*compiled, *modes, "-o", tmp_path / "package")
    x = np.random.default_rng(0).standard_normal((3, 32)).astype(np.float32)
    with Pipeline(tmp_path / "package", threads=1) as opened:
        for name, feeds, use in zip(decoders(), ({"x": x}, {"x": x, "past": -x}), (False, True), strict=True):
            expected = run_whole(merged, {"past": -x, **feeds, "use_past": np.array([use])})
            assert_close(opened[name].run(feeds), expected)


def test_package_is_replaced_whole_or_not_at_all(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "package"
    write_decoders(tmp_path / "decoders")
    splitc("compile", tmp_path / "decoders", "-d", "cpu0", "-o", target)
    before = files(target)
    assert "exists already" in said("compile", folder, "-d", "cpu0", "-o", target, code=2)
    monkeypatch.setattr("splitc.compiler.pipelines.writer.write_pipeline", fails)
    assert "no room" in said("compile", folder, "-d", "cpu0", "-o", target, "--force", code=1)
    monkeypatch.undo()
    assert files(target) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decoders", "package"]
    (target / "decoder_model" / "notes.txt").touch()
    assert "has decoder_model/notes.txt in it" in said("compile", folder, "-d", "cpu0", "-o", target, "--force", code=2)
    (target / "decoder_model" / "notes.txt").unlink()
    splitc("compile", folder, "-d", "cpu0", "-o", target, "--force", "--weights", "link", "--no-verify")
    assert (target / "unet" / "rank0" / "source0.weights").samefile(folder / "unet" / "model.onnx.data")


def fails(*_: Any) -> None:
    raise OSError(5, "no room for this")


def test_file_in_the_place_of_a_package_file_can_not_travel(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    save(text_encoder(1).model(), folder / "text_encoder" / "model.onnx")
    (folder / "text_encoder" / "manifest.json").touch()
    message = said("compile", folder, "-d", "cpu0", "-o", tmp_path / "package", code=2)
    assert "manifest.json can't travel: the package has a file of its own" in message
    assert not (tmp_path / "package").exists()


def test_only_module_needs_no_name(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    save(text_encoder(1).model(), folder / "model.onnx")
    (folder / "tokenizer.json").touch()
    splitc("compile", folder, "-d", "cpu0", "-o", tmp_path / "package", "--fill", "input_ids=randint:0:9")
    with Session(tmp_path / "package") as session:
        assert session.inputs[0].fill is not None
    splitc("check", tmp_path / "package", "--model", folder, "--fill", "input_ids=ones", "--no-memory")
    assert "rank0" in splitc("inspect", tmp_path / "package", "--rank", "0").stdout
    assert "--module names a model of a folder" in said(
        "plan", folder / "model.onnx", "-d", "cpu0", "--module", "model", code=2
    )


def test_an_adapter_is_for_the_model_that_is_named(folder: Path, tmp_path: Path) -> None:
    adapter = write_peft(tmp_path / "style", random_pairs({"layers.0.up": (32, 128)}))
    assert "there are several models" in said("plan", folder, "-d", "2xcpu", "--lora", adapter, code=2)
    splitc("compile", folder, "-d", "2xcpu", "--lora", f"text_encoder={adapter}:0.5", "-o", tmp_path / "package")
    with Pipeline(tmp_path / "package") as opened:
        merged = {name: session.manifest.merged for name, session in opened.items()}
        assert merged == {"text_encoder": [MergedAdapter("style", 0.5, 1)], "unet": [], "vae_decoder": []}
        feeds = diffusers_feeds()["text_encoder"]
        plain = run_whole(folder / "text_encoder" / "model.onnx", feeds)
        given = opened["text_encoder"].run(feeds)
        assert all(np.abs(given[name] - array).max() > 0.01 for name, array in plain.items())
