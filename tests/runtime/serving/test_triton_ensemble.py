"""Ensembles of stages for Triton: their files, and a run in Triton itself if it is installed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from splitc.runtime.errors import MisuseError
from splitc.runtime.package.manifest import Tensor
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.serving.triton_ensemble import ensemble_config, export_ensemble, stage_config
from tests.conftest import assert_close, decoder_feeds, run_whole
from tests.helpers.clients import infer
from tests.helpers.command import splitc
from tests.helpers.onnx_in_triton import replace_backend
from tests.helpers.packages import compile_mode
from tests.helpers.servers import has_triton, triton_server


def test_each_stage_is_a_model_on_its_device(package: Path, tmp_path: Path) -> None:
    splitc("export", "triton", package, "-o", tmp_path, "--name", "decoder", "--ensemble")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decoder", *(f"decoder_stage{n}" for n in range(3))]
    assert (tmp_path / "decoder_stage1" / "config.pbtxt").read_text() == (
        'name: "decoder_stage1"\nbackend: "onnxruntime"\nmax_batch_size: 0\n'
        'default_model_filename: "stage1.onnx"\ninstance_group { kind: KIND_CPU count: 1 }\n'
    )
    for file in (package / "rank1").iterdir():
        assert (tmp_path / "decoder_stage1" / "1" / file.name).stat().st_ino == file.stat().st_ino
    manifest = read_manifest(package)
    rank = msgspec.structs.replace(manifest.ranks[1], device="cuda3")
    assert "instance_group { kind: KIND_GPU count: 1 gpus: [ 3 ] }" in stage_config("x", rank, rank.engines[0])


def test_steps_hand_on_what_crosses(package: Path) -> None:
    manifest = read_manifest(package)
    text = ensemble_config("decoder", manifest)
    (crossing,) = manifest.cuts[0].values
    assert f'output_map {{ key: "{crossing}" value: "{crossing}" }}' in text.split("decoder_stage1")[0]
    assert f'input_map {{ key: "{crossing}" value: "{crossing}" }}' in text.split("decoder_stage1")[1]
    assert 'output { name: "present.1.value"' in text


def test_what_ensembles_can_not_have_is_refused(package: Path, decoder: Path, tmp_path: Path) -> None:
    manifest = read_manifest(package)
    scalar = msgspec.structs.replace(manifest, inputs=[*manifest.inputs, Tensor("t", "float32", [])])
    with pytest.raises(MisuseError, match="'t' is a scalar"):
        ensemble_config("m", scalar)
    passed = msgspec.structs.replace(manifest, outputs=[*manifest.outputs, manifest.inputs[0]])
    with pytest.raises(MisuseError, match="'input_ids' is an input and an output"):
        ensemble_config("m", passed)
    options = ("-o", tmp_path / "repository", "--ensemble")
    found = splitc("export", "triton", compile_mode(decoder, "tensor"), *options, code=2)
    assert "Triton runs stages one after the other" in found.stderr
    found = splitc("export", "triton", package, *options, "--batch", 2, code=2)
    assert "--batch has no effect with --ensemble" in found.stderr
    assert not (tmp_path / "repository").exists()


@pytest.mark.skipif(not has_triton(), reason="needs nvidia-pytriton and tritonclient")
def test_triton_runs_the_stages_as_one(package: Path, decoder: Path, tmp_path: Path) -> None:
    """With a fake backend that runs a stage, which pip's server lacks."""
    folders = export_ensemble(package, tmp_path / "repository", module=None, name="decoder")
    for folder in folders[1:]:
        replace_backend(folder)
    with triton_server(tmp_path / "repository", tmp_path) as server:
        for sizes in ((2, 3, 5), (1, 7, 0)):
            feeds = decoder_feeds(*sizes)
            assert_close(infer(server, "decoder", feeds), run_whole(decoder, feeds))
