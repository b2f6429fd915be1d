"""Weights that modules have in common."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from models.llama import build
from models.writer import save
from splitc.compiler import Request, compile_pipeline, plan_pipeline
from splitc.compiler.pipelines import common_weights
from splitc.runtime import Pipeline
from splitc.runtime.arrays.array import bytes_of
from splitc.runtime.package.manifest import Rank, Weight
from splitc.runtime.package.manifest_file import read_manifest
from tests.conftest import DECODER, assert_close, run_whole
from tests.helpers.command import splitc
from tests.helpers.folders import LAYERS, diffusers_folder, write_decoders

# Bytes of a decoder's weight.
WEIGHT = 32 * 32 * 4
BOTH = ["decoder_model", "decoder_with_past_model"]


@pytest.fixture
def decoders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two decoders with the same weights, each in its own file."""
    monkeypatch.setattr(common_weights, "LISTED", WEIGHT)
    write_decoders(tmp_path / "folder")
    return tmp_path / "folder"


@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_equal_weights_have_one_key(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two ranks has its own keys, for whole weights and for shards."""
    monkeypatch.setattr(common_weights, "LISTED", WEIGHT)
    names = ["one", "other"]
    for name in names:
        save(build(DECODER), tmp_path / "folder" / name / f"{name}.onnx")
    devices = [f"{name}=cpu0&cpu1" for name in names]
    plan = plan_pipeline(tmp_path / "folder", devices, Request(split_mode=mode, spread=True))
    assert all(each.common == 0 for each in plan.devices)  # each session on a CPU has its own copies
    manifests = compile_pipeline(plan, tmp_path / "package", verify=False)
    for name in names:
        assert read_manifest(tmp_path / "package" / name) == manifests[name]
    one, other = ([keys(rank) for rank in manifests[name].ranks] for name in names)
    assert one == other
    large = [{name for name, (key, size) in rank.items() if size >= WEIGHT} for rank in one]
    assert all(large)
    for rank, names_of_large in zip(one, large, strict=True):
        assert {name for name, (key, _) in rank.items() if key} == names_of_large
    whole = [name for name in large[0] & large[1] if one[0][name] == one[1][name]]
    assert len(whole) < len(large[0]) / 4


def test_groups_that_divide_rows_have_the_keys_of_one(decoders: Path, tmp_path: Path) -> None:
    request = Request(split_mode=f"{BOTH[0]}=batch,layer", shapes={"x": (4, 32)})
    plan = plan_pipeline(decoders, [f"{BOTH[0]}=cpu0&cpu1", f"{BOTH[1]}=cpu1"], request, BOTH)
    manifests = compile_pipeline(plan, tmp_path / "package", verify=False)
    first, other = (keys(rank) for name in BOTH for rank in manifests[name].ranks[:1])
    assert set(first.values()) & set(other.values())
    with Pipeline(tmp_path / "package") as pipeline:
        x = np.random.default_rng(0).standard_normal((5, 32), dtype=np.float32)
        for name, feeds in zip(BOTH, ({"x": x}, {"x": x, "past": x[::-1]}), strict=True):
            assert_close(pipeline[name].run(feeds), run_whole(decoders / f"{name}.onnx", feeds))


def keys(rank: Rank) -> dict[str, tuple[str, int]]:
    """The keys and bytes of a rank's weights."""
    weights = [weight for engine in rank.engines for weight in engine.weights or []]
    return {weight.name: (weight.key, bytes_of(tuple(weight.shape), weight.dtype)) for weight in weights}


def test_gpu_holds_them_once(decoders: Path, tmp_path: Path) -> None:
    request = Request(split_mode="layer", spread=True, shapes={"x": (1, 32)}, memory=["4GiB"])
    alone, both = (
        plan_pipeline(decoders, [f"{name}=cuda0&cuda1" for name in wanted], request, wanted)
        for wanted in (BOTH[:1], BOTH)
    )
    large = len(LAYERS) * WEIGHT
    assert sum(each.common for each in both.devices) == large
    assert [each.common for each in alone.devices] == [0, 0]
    weights = [sum(each.weights for each in plan.devices) for plan in (alone, both)]
    assert weights[1] - weights[0] < WEIGHT  # what else the second one has
    devices = ",".join(f"{name}=cuda0&cuda1" for name in BOTH)
    command = ["plan", decoders, "-d", devices, "--memory", "4GiB", "--shapes", "x:1x32", "--engine", "onnxruntime"]
    shown = " ".join(splitc(*command, "--split-mode", "layer").stdout.split())
    assert "of weights are held once, for several modules" in shown


def test_what_only_looks_alike_is_told_apart(decoders: Path, tmp_path: Path) -> None:
    data = next(decoders.glob("decoder_model.onnx.data"))
    content = bytearray(data.read_bytes())
    content[WEIGHT // 2] ^= 1  # between what is compared first
    common_weights.GLANCE, before = 8, common_weights.GLANCE
    try:
        data.write_bytes(content)
        plan = plan_pipeline(decoders, ["cpu0"], Request(shapes={"x": (1, 32)}), BOTH)
    finally:
        common_weights.GLANCE = before
    assert all(len(rank) == len(LAYERS) - 1 for ranks in plan.common.keys.values() for rank in ranks)


def test_models_without_common_weights_have_no_keys(tmp_path: Path) -> None:
    plan = plan_pipeline(diffusers_folder(tmp_path), ["2xcpu"], Request())
    assert plan.common == common_weights.NONE
    assert Weight("w", "float32", [1], "f", 0).key == ""
