"""What a package is compared with: the unsplit model, on the kind of device that the package runs on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from typer.testing import CliRunner

from models.writer import Writer, save
from splitc.compiler import compile_model, plan_model
from splitc.runtime.cli.app import app
from splitc.runtime.engines import Backend
from splitc.runtime.engines.kinds import make_backend
from splitc.runtime.errors import MisuseError, PackageError
from splitc.runtime.hardware.devices import Device
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.tools.rounding import TRIES, Arrays, nudged
from splitc.runtime.tools.unsplit import choose_reference, open_reference
from tests.conftest import assert_close, decoder_feeds, run_whole
from tests.helpers.blocks import Block

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


def test_model_for_gpus_alone_is_said_to_be_one(tmp_path: Path) -> None:
    """Packages of it run on CPU devices, and 'splitc check' reads the model as it is."""
    random = np.random.default_rng(0)
    b = Writer()
    image = b.input("x", ir.DataType.FLOAT, ["n", 8, 8, 4])
    kernel = b.weight("kernel", ir.tensor(random.random((8, 3, 3, 4), np.float32)))
    made = b.op("com.microsoft.NhwcConv", image, kernel, kernel_shape=[3, 3])
    b.output(made, "y", ir.DataType.FLOAT, ["n", 6, 6, 8])
    save(b.model(), tmp_path / "model.onnx")
    compile_model(plan_model(tmp_path / "model.onnx", "cpu0"), tmp_path / "package")
    manifest = read_manifest(tmp_path / "package")
    with (
        pytest.raises(PackageError, match="Only GPUs may have"),
        open_reference(tmp_path / "model.onnx", manifest, [CPU], 1),
    ):
        pass


def without_gpus(engine: str, device: Device, *options: Any) -> Backend:
    if device.kind == "cuda":
        raise PackageError("no kernel")
    return make_backend(engine, device, *options)


def test_model_runs_with_other_weights(tmp_path: Path) -> None:
    """A step away in some directions. What stands for infinity, and short weights, such as exponents, stay."""
    b = Block()
    ids = b.indices("ids", [3, 1], ["n"])
    picked = b.op("Mul", b.op("Gather", b.w("table", 30, 12), ids), b.w("scale", 12))
    masked = b.op("Add", picked, b.constant([np.finfo(np.float32).min, *[0.0] * 11], np.float32))
    b.give(b.op("Pow", b.op("Softmax", masked), b.weight("two", ir.tensor(np.array([2], np.float32)))), shape=["n", 12])
    model = tmp_path / "model.onnx"
    ir.save(b.model(), model, external_data="data")
    compile_model(plan_model(model, "cpu0"), tmp_path / "package")
    with open_reference(model, read_manifest(tmp_path / "package"), [CPU], 1) as whole:
        expected, moved = whole.run(b.feeds)["y"], [made["y"] for made in whole.run_nudged(b.feeds)]
    for made in moved:
        assert not np.array_equal(made, expected)
        np.testing.assert_allclose(made, expected, rtol=1e-5)
    assert len(moved) == TRIES


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_numbers_move_in_all_directions(dtype: npt.DTypeLike) -> None:
    """A scale that is computed from all numbers follows them if all move up, and what it divides stays as it is."""
    given: Arrays = {"x": np.random.default_rng(0).standard_normal(100).astype(dtype), "n": np.arange(3)}
    signs = [np.sign(made["x"] - given["x"]) for made in nudged(given)]
    assert [set(sign) for sign in signs] == [{1.0}, {-1.0}, *[{1.0, -1.0}] * (TRIES - 2)]
    assert not np.array_equal(signs[2], signs[3])
    assert all(np.array_equal(made["n"], given["n"]) for made in nudged(given))


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.BFLOAT16])
def test_weights_move_what_feeds_have_no_part_in(tmp_path: Path, dtype: ir.DataType) -> None:
    """As caches have hardly any in a router's choice."""
    b = Block()
    ids, past = b.indices("ids", [3, 1], ["n"]), b.data("past", (2, 4), ["n", 4])
    random = {"table": b.random("table", 30, 12), "scale": b.random("scale", 12)}
    table, scale = (b.weight(n, ir.tensor(array.astype(dtype.numpy()), dtype)) for n, array in random.items())
    scores = b.op("Mul", b.op("Gather", table, ids), scale)
    b.give(b.op("Cast", scores, to=ir.DataType.FLOAT), "scores", ["n", 12])
    b.give(b.op("Neg", past), "present", ["n", 4])
    save(b.model(), tmp_path / "model.onnx")
    compile_model(plan_model(tmp_path / "model.onnx", "cpu0"), tmp_path / "package")
    with open_reference(tmp_path / "model.onnx", read_manifest(tmp_path / "package"), [CPU], 1) as whole:
        expected, moved = whole.run(b.feeds), list(whole.run_nudged(b.feeds))
    changed = [{name for name, array in made.items() if not np.array_equal(array, expected[name])} for made in moved]
    assert changed == [{"present"}] * TRIES + [{"scores"}] * TRIES


def test_a_value_that_is_not_a_number_is_named(tmp_path: Path) -> None:
    b = Block()
    ratio = b.op("Div", b.data("x", (2, 4), ["n", 4]), b.data("y", (2, 4), ["n", 4]))
    b.give(b.op("Where", b.op("IsNaN", ratio), b.w("other", 4), ratio), "made", ["n", 4])
    save(b.model(), tmp_path / "model.onnx")
    compile_model(plan_model(tmp_path / "model.onnx", "cpu0"), tmp_path / "package")
    with open_reference(tmp_path / "model.onnx", read_manifest(tmp_path / "package"), [CPU], 1) as whole:
        assert whole.undefined(b.feeds) == ""
        assert whole.undefined({name: np.zeros_like(feed) for name, feed in b.feeds.items()}) == ratio.name


def test_check_says_what_it_compared_with(decoder: Path, package: Path) -> None:
    check = ["check", str(package), "-m", str(decoder), "--no-memory"]
    assert "reference: the unsplit model on cpu0\n" in CliRunner().invoke(app, check).output
    asked = CliRunner().invoke(app, [*check, "--reference", "cpu1"]).output
    assert "reference: the unsplit model on cpu1\n" in asked
    assert '"reference": "cpu1"' in CliRunner().invoke(app, [*check, "--reference", "cpu1", "--json"]).output
