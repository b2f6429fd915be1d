"""Folders that are planned for modules which work in turn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from splitc.compiler import Request, plan_pipeline
from splitc.compiler.pipelines.common_weights import NONE
from splitc.runtime import Pipeline
from splitc.runtime.errors import DoesNotFitError
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.tools.module_sums import IN_TURN, sum_modules
from tests.conftest import assert_close, run_whole
from tests.helpers.command import splitc
from tests.helpers.folders import diffusers_feeds, diffusers_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of 45, 577 and 1 KiB."""
    return diffusers_folder(tmp_path_factory.mktemp("diffusers"), text_layers=16, unet_layers=16)


@pytest.mark.parametrize("devices", ["cpu", "cuda"])
def test_the_largest_modules_weights_count(folder: Path, devices: str) -> None:
    request = Request(split_mode="unet=layer,layer", memory=["8GiB"], engine="onnxruntime")
    plain, swap = (plan_pipeline(folder, [f"2x{devices}"], request, swap=swap) for swap in (False, True))
    assert not any(each.swapped for each in plain.devices)
    for each in swap.devices:
        ranks = [[rank for rank in module.plan.ranks if str(rank.device) == each.device] for module in swap.modules]
        assert each.weights == each.swapped == max(sum(rank.memory.weights for rank in own) for own in ranks)
    assert sum(each.weights for each in swap.devices) < sum(each.weights for each in plain.devices)
    assert swap.common == NONE


def test_what_does_not_fit_together_fits_in_turn(folder: Path) -> None:
    largest = max(each.total for each in plan_pipeline(folder, ["cpu0"], Request(), swap=True).devices)
    request = Request(memory=[str(largest)])
    with pytest.raises(DoesNotFitError):
        plan_pipeline(folder, ["cpu0"], request)
    (device,) = plan_pipeline(folder, ["cpu0"], request, swap=True).devices
    assert not device.missing
    with pytest.raises(DoesNotFitError):
        plan_pipeline(folder, ["cpu0"], Request(memory=[str(largest - 1)]), swap=True)


def test_engines_with_weights_inside_do_not_swap(folder: Path) -> None:
    request = Request(split_mode="layer", memory=["8GiB"], engine="tensorrt")
    plain, swap = (plan_pipeline(folder, ["2xcuda"], request, swap=swap) for swap in (False, True))
    assert plain.devices == swap.devices


def test_package_says_that_its_modules_swap(folder: Path, tmp_path: Path) -> None:
    plan, package = tmp_path / "plan.json", tmp_path / "package"
    shown = splitc("plan", folder, "-d", "cpu0", "--swap", "-o", plan).stdout
    assert "modules work in turn" in " ".join(shown.split())
    assert json.loads(plan.read_text())["swap"] is True
    splitc("compile", folder, "--plan", plan, "-o", package, code=0)
    assert IN_TURN in " ".join(splitc("inspect", package).stdout.split())
    assert json.loads(splitc("inspect", package, "--json").stdout)["swap"] is True
    manifests = {name: read_manifest(package / name) for name in diffusers_feeds()}
    planned, plain = json.loads(plan.read_text())["devices"], sum_modules(manifests)
    for device, held in sum_modules(manifests, swap=True).items():
        assert held.swapped == planned[device]["swapped_bytes"] > 0
        assert held.weights == planned[device]["weights_bytes"] < plain[device].weights
    assert "--swap" in splitc("compile", folder, "--plan", plan, "-o", package, "--swap", "--force", code=2).stderr
    assert "one model" in splitc("plan", folder / "unet" / "model.onnx", "-d", "cpu0", "--swap", code=2).stderr
    for swap in (None, False):
        with Pipeline(package, swap=swap, threads=1) as opened:
            assert opened.swap == (swap is None)
            for name, feeds in diffusers_feeds().items():
                assert_close(opened[name].run(feeds), run_whole(folder / name / "model.onnx", feeds))
