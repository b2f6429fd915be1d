"""What a package is compared with: the unsplit model, on the kind of device that the package runs on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from splitc.runtime.engines import Backend
from splitc.runtime.engines.kinds import make_backend
from splitc.runtime.errors import MisuseError, PackageError
from splitc.runtime.hardware.devices import Device
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.tools.unsplit import choose_reference, open_reference
from tests.conftest import assert_close, decoder_feeds, run_whole
from tests.helpers.app import app

CPU, GPU = Device("cpu", 0), Device("cuda", 3)


def test_cpu_devices_are_compared_on_the_cpu() -> None:
    assert choose_reference(None, [Device("cpu", 1), Device("cpu", 2)], 1 << 60, lambda _: 0) == (CPU, "")


def test_gpus_are_compared_on_the_first_of_them() -> None:
    assert choose_reference(None, [CPU, GPU, Device("cuda", 4)], 100, lambda _: 100) == (GPU, "")


def test_what_does_not_fit_a_gpu_is_compared_on_the_cpu() -> None:
    assert choose_reference(None, [GPU], 2048, lambda _: 1024) == (
        CPU,
        "it needs 2.00 KiB, and cuda3 has 1.00 KiB free",
    )
    device, why = choose_reference(None, [GPU], 1, lambda _: None)
    assert (device, why.endswith("cuda3 has an unknown amount of memory free")) == (CPU, True)


def test_device_may_be_asked_for() -> None:
    assert choose_reference("cuda3", [CPU], 1 << 60, lambda _: 0) == (GPU, "")
    with pytest.raises(MisuseError, match="--reference 2xcpu names 2 devices: the unsplit model runs on one"):
        choose_reference("2xcpu", [GPU], 0, lambda _: 0)


def test_gpu_that_can_not_run_the_model_is_left_for_the_cpu(
    decoder: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This one is not there; of others kernels may be missing."""
    monkeypatch.setattr("splitc.runtime.tools.unsplit.free_bytes", lambda devices: [1 << 60])
    monkeypatch.setattr("splitc.runtime.tools.unsplit.make_backend", without_gpus)
    manifest, feeds = read_manifest(package), decoder_feeds()
    with open_reference(decoder, manifest, [GPU], 1) as whole:
        assert str(whole) == "the unsplit model on cpu0 (cuda3 can't run it: no kernel)"
        assert_close(whole.run(feeds), run_whole(decoder, feeds))
    with pytest.raises(PackageError, match="no kernel"), open_reference(decoder, manifest, [GPU], 1, asked="cuda3"):
        pass


def without_gpus(engine: str, device: Device, *options: Any) -> Backend:
    if device.kind == "cuda":
        raise PackageError("no kernel")
    return make_backend(engine, device, *options)


def test_check_says_what_it_compared_with(decoder: Path, package: Path) -> None:
    check = ["check", str(package), "-m", str(decoder), "--no-memory"]
    assert "reference: the unsplit model on cpu0\n" in CliRunner().invoke(app, check).output
    asked = CliRunner().invoke(app, [*check, "--reference", "cpu1"]).output
    assert "reference: the unsplit model on cpu1\n" in asked
    assert '"reference": "cpu1"' in CliRunner().invoke(app, [*check, "--reference", "cpu1", "--json"]).output
