"""Folders of models: their modules, the files that are copied, and the files that are left out."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from models.writer import save
from splitc.compiler import compile_model, plan_model
from splitc.compiler.errors import ModelError
from splitc.compiler.pipelines.config_sizes import find_sizes
from splitc.compiler.pipelines.folder import Dimension, FolderModule, ModelFacts, ModelFolder, read_folder
from splitc.runtime.errors import MisuseError
from tests.helpers.folders import diffusers_folder, image_decoder, text_encoder, write_decoders, write_json


def left_out(folder: ModelFolder) -> dict[str, str]:
    return {each.path: each.why for each in folder.left_out}


def write(path: Path) -> None:
    save(image_decoder().model(), path)


def test_subfolders_give_modules_their_names(tmp_path: Path) -> None:
    diffusers_folder(tmp_path)
    folder = read_folder(tmp_path / "unet" / "..")
    assert folder.names == ["text_encoder", "unet", "vae_decoder"]
    assert [path.as_posix() for path in folder.files] == [
        "model_index.json",
        "text_encoder/config.json",
        "tokenizer/tokenizer_config.json",
        "unet/config.json",
        "vae_decoder/config.json",
    ]
    assert left_out(folder) == {"unet/diffusion_pytorch_model.safetensors": "weights in another format"}
    assert read_folder(tmp_path, ["vae", "te"]).names == ["vae_decoder", "text_encoder"]


def test_one_of_several_files_keeps_its_own_name(tmp_path: Path) -> None:
    for name in ("onnx/model.onnx", "onnx/model_fp16.onnx", "vision.onnx", "sound/encoder.onnx"):
        write(tmp_path / name)
    assert sorted(read_folder(tmp_path).names) == ["model_fp16", "onnx", "sound", "vision"]


def test_folders_above_tell_models_of_one_name_apart(tmp_path: Path) -> None:
    places = ("onnx", "a/onnx", "b/onnx", "c/x/vae", "d/x/vae")
    for place in places:
        write(tmp_path / place / "model.onnx")
    folder = read_folder(tmp_path)
    assert {folder.source(each): each.name for each in folder.modules} == {
        f"{place}/model.onnx": place.replace("/", "_") for place in places
    }
    write(tmp_path / "a_onnx.onnx")
    with pytest.raises(ModelError, match=r"two models have the name 'a_onnx', .*a_onnx\.onnx and .*a/onnx/model\.onnx"):
        read_folder(tmp_path)


def test_packages_that_lie_in_it_are_no_models(tmp_path: Path) -> None:
    """Nor are their files copied: a package is compiled into the models' own folder, twice."""
    write(tmp_path / "model.onnx")
    compile_model(plan_model(tmp_path / "model.onnx", "2xcpu"), tmp_path / "package")
    write(tmp_path / "several" / "unet" / "rank0" / "stage0.onnx")
    write_json(tmp_path / "several" / "pipeline.json", {})
    folder = read_folder(tmp_path)
    assert [folder.source(module) for module in folder.modules] == ["model.onnx"]
    assert not folder.files and not folder.left_out


def test_merged_decoder_gives_way_to_the_two_that_it_holds(tmp_path: Path) -> None:
    write_decoders(tmp_path)
    folder = read_folder(tmp_path)
    assert folder.names == ["decoder_model", "decoder_with_past_model"]
    (why,) = left_out(folder).values()
    assert why.startswith("decoder_model and decoder_with_past_model in one file, which 'use_past' chooses between")
    asked = read_folder(tmp_path, ["decoder_model_merged"])
    assert [(each.name, each.settings) for each in asked.modules] == [
        ("decoder_model", {"use_past": False}),
        ("decoder_with_past_model", {"use_past": True}),
    ]
    assert {each.facts.path.name for each in asked.modules} == {"decoder_model_merged.onnx"}
    bound = read_folder(tmp_path, ["decoder_model_merged"], ["decoder_model_merged.use_past"])
    assert bound.names == ["decoder_model_merged"]
    with pytest.raises(ModelError, match=r"two models have the name 'decoder_model', .*decoder_model_merged\.onnx"):
        read_folder(tmp_path, ["decoder_model", "decoder_model_merged"])


def test_merged_decoder_alone_has_two_uses(tmp_path: Path) -> None:
    write_decoders(tmp_path)
    (tmp_path / "decoder_model.onnx").unlink()
    (tmp_path / "decoder_with_past_model.onnx").unlink()
    assert read_folder(tmp_path).names == ["decoder_model", "decoder_with_past_model"]


def test_genai_names_its_models(tmp_path: Path) -> None:
    for name in ("model.onnx", "vision.onnx", "embed.onnx", "draft.onnx"):
        write(tmp_path / name)
    (tmp_path / "tokenizer.json").touch()
    config = {
        "model": {
            "decoder": {"filename": "model.onnx", "head_size": 8},
            "vision": {"filename": "vision.onnx", "config_filename": "processor_config.json"},
            "embedding": {"filename": "embed.onnx"},
        }
    }
    write_json(tmp_path / "genai_config.json", config)
    folder = read_folder(tmp_path)
    assert {each.name: folder.source(each) for each in folder.modules} == {
        "decoder": "model.onnx",
        "vision": "vision.onnx",
        "embedding": "embed.onnx",
    }
    assert folder.files == (PurePosixPath("genai_config.json"), PurePosixPath("tokenizer.json"))
    assert left_out(folder) == {"draft.onnx": "genai_config.json does not name it"}
    (tmp_path / "embed.onnx").unlink()
    with pytest.raises(ModelError, match=r"names the model embed\.onnx, which is not in"):
        read_folder(tmp_path)


def test_folders_that_are_odd(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no ONNX file in it"):
        read_folder(tmp_path)
    write(tmp_path / "a" / "unet" / "model.onnx")
    write(tmp_path / "b" / "image_encoder" / "model.onnx")
    with pytest.raises(
        MisuseError, match=r"--module names the module 'vae', which is not there: there are unet, image"
    ):
        read_folder(tmp_path, ["vae"])
    (tmp_path / "a" / "unet" / "model.onnx").write_text("text")
    with pytest.raises(ModelError, match="is not an ONNX model"):
        read_folder(tmp_path)
    (tmp_path / "pipeline.json").touch()
    with pytest.raises(ModelError, match="is a package, made by 'splitc compile'"):
        read_folder(tmp_path)


def test_name_that_is_no_text(tmp_path: Path) -> None:
    diffusers_folder(tmp_path)
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff.txt")).touch()
    with pytest.raises(ModelError, match="not UTF-8: give it another one"):
        read_folder(tmp_path)


def test_links_that_lead_outside_do_not_travel(tmp_path: Path) -> None:
    folder, secret = tmp_path / "folder", tmp_path / "secret"
    write(folder / "vae" / "model.onnx")
    secret.touch()
    (folder / "vocab.txt").symlink_to(secret)
    with pytest.raises(ModelError, match=r"vocab\.txt is a link to .*secret, outside the models' folder: --trust"):
        read_folder(folder)
    assert read_folder(folder, trusts_links=True).files == (PurePosixPath("vocab.txt"),)
    (folder / "vocab.txt").unlink()
    (folder / "vocab.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="can't travel with the models: it is not a file"):
        read_folder(folder)


def test_links_to_folders_of_models(tmp_path: Path) -> None:
    """As of a text encoder that several pipelines have. Links within the folder, or around it, are known."""
    folder, other = tmp_path / "folder", tmp_path / "other"
    write(folder / "vae" / "model.onnx")
    write(other / "model.onnx")
    (other / "config.json").touch()
    (tmp_path / "texts").mkdir()
    for name, target in (("te", other), ("again", folder / "vae"), ("up", tmp_path), ("texts", tmp_path / "texts")):
        (folder / name).symlink_to(target)
    (other / "itself").symlink_to(other)
    with pytest.raises(ModelError, match=r"te/model\.onnx is a link to .*, outside the models' folder: --trust"):
        read_folder(folder)
    read = read_folder(folder, trusts_links=True)
    assert (read.names, read.files) == (["te", "vae"], (PurePosixPath("te/config.json"),))


def test_caches_of_links_are_folders_too(tmp_path: Path) -> None:
    """As in the Hugging Face Hub's cache: all files are links into one folder of files named by hash."""
    write(tmp_path / "blobs" / "1")
    (tmp_path / "blobs" / "2").touch()
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.onnx").symlink_to(tmp_path / "blobs" / "1")
    (tmp_path / "snapshot" / "config.json").symlink_to(tmp_path / "blobs" / "2")
    folder = read_folder(tmp_path / "snapshot")
    assert (folder.names, folder.files) == (["model"], (PurePosixPath("config.json"),))


def test_configs_give_sizes(tmp_path: Path) -> None:
    folder = read_folder(diffusers_folder(tmp_path))
    found = {module.name: find_sizes(folder, module) for module in folder.modules}
    assert found == {
        "text_encoder": {"input_ids": (None, 12)},
        "unet": {"sample": (None, None, 8, 8), "encoder_hidden_states": (None, 12)},
        "vae_decoder": {"latent_sample": (None, None, 8, 8)},
    }
    (tmp_path / "tokenizer" / "tokenizer_config.json").unlink()
    assert find_sizes(folder, folder.modules[0]) == {"input_ids": (None, 77)}


def test_speech_config_gives_sizes(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"num_mel_bins": 80, "max_source_positions": 1500, "d_model": 384})
    inputs: dict[str, tuple[Dimension, ...]] = {
        "input_features": ("b", 80, "t"),
        "encoder_hidden_states": ("b", "s", 384),
        "input_ids": ("b", "n"),
    }
    facts = ModelFacts(tmp_path / "model.onnx", inputs, frozenset(), 0, frozenset())
    module = FolderModule("model", facts)
    found = find_sizes(ModelFolder(tmp_path, (module,), (), ()), module)
    assert found == {"input_features": (None, 80, 3000), "encoder_hidden_states": (None, 1500)}


@pytest.mark.parametrize("config", [{}, {"model_type": "vision-encoder-decoder"}])
def test_vision_config_gives_sizes(config: dict[str, Any], tmp_path: Path) -> None:
    """Its own config, or that of the encoder in it. Caches are not images."""
    vision = {"image_size": 48, "num_channels": 3}
    write_json(tmp_path / "config.json", {**config, "encoder": vision} if config else vision)
    inputs: dict[str, tuple[Dimension, ...]] = {
        "pixel_values": ("batch", "channels", "height", "width"),
        "cut": ("batch", 3, "h", "w"),
        "past": ("batch", 4, "past", 8),
    }
    facts = ModelFacts(tmp_path / "model.onnx", inputs, frozenset(), 0, frozenset())
    module = FolderModule("model", facts)
    found = find_sizes(ModelFolder(tmp_path, (module,), (), ()), module)
    assert found == {"pixel_values": (None, 3, 48, 48), "cut": (None, None, 48, 48)}


def test_genai_config_gives_sizes_of_caches(tmp_path: Path) -> None:
    decoder = {"filename": "model.onnx", "num_key_value_heads": 2, "head_size": 24}
    write_json(tmp_path / "genai_config.json", {"model": {"decoder": decoder}})
    inputs: dict[str, tuple[Dimension, ...]] = {
        "past.0": ("batch", 2, "past", "width"),
        "past.1": ("batch", 2, "past", 24),
        "input_ids": ("batch", "n"),
    }
    facts = ModelFacts(tmp_path / "model.onnx", inputs, frozenset(), 0, frozenset())
    module = FolderModule("decoder", facts)
    found = find_sizes(ModelFolder(tmp_path, (module,), (), ()), module)
    assert found == {"past.0": (None, 2, None, 24)}


def test_text_model_of_a_single_folder_keeps_its_defaults(tmp_path: Path) -> None:
    """A decoder's number of positions is not a length to plan for."""
    save(text_encoder(1).model(), tmp_path / "model.onnx")
    write_json(tmp_path / "config.json", {"max_position_embeddings": 131072})
    folder = read_folder(tmp_path)
    assert find_sizes(folder, folder.modules[0]) == {}
