"""Packages are written completely or not at all."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from models.llama import build
from models.writer import save
from splitc.compiler import Plan, Request, compile_model, plan_model
from splitc.compiler.packaging.manifest_entries import number_type
from splitc.compiler.packaging.package import least_bytes
from splitc.compiler.packaging.writer import HashedFile
from splitc.runtime import MisuseError, PackageError, Session, SplitcError
from splitc.runtime.hardware.devices import parse_devices
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.threads.progress import listening
from tests.conftest import DECODER, LAYER, assert_close, decoder_feeds, run_whole
from tests.helpers.blocks import Block
from tests.helpers.needs import needs_caches
from tests.helpers.operators import as_float, stored


@pytest.fixture(scope="module")
def plan(decoder: Path) -> Plan:
    return plan_model(decoder, parse_devices(["2xcpu"]), LAYER)


def test_manifest_says_what_was_decided(decoder: Path, plan: Plan, tmp_path: Path) -> None:
    compile_model(plan, tmp_path / "package", threads=3)
    manifest = read_manifest(tmp_path / "package")
    assert manifest.threads == 3
    assert manifest.number_type == "float32"
    assert manifest.blocks == ["prologue", "layers.0", "layers.1", "epilogue"]
    assert [rank.device for rank in manifest.ranks] == ["cpu0", "cpu1"]
    assert [rank.weights_bytes for rank in manifest.ranks] == [rank.memory.weights for rank in plan.ranks]
    assert len(manifest.states) == 4
    assert {file.path for file in manifest.files} == {
        f"rank{number}/stage{number}.{ending}" for number in (0, 1) for ending in ("onnx", "weights")
    }
    with Session(tmp_path / "package") as session:
        assert session.threads == 3


@pytest.mark.parametrize(("kind", "expected"), [("Round", "int8"), ("Relu", "float32")])
def test_8_bit_weights_count_where_activations_are_rounded(kind: str, expected: str, tmp_path: Path) -> None:
    """By operators for floats, as BitNet's are."""
    b = Block()
    rounded = b.op(kind, b.op("Mul", b.data("x", (5, 12), ["n", 12]), b.constant(9.0, np.float32)))
    b.give(b.op("MatMul", rounded, as_float(b, stored(b, "A", 12, 24))), shape=["n", 24])
    save(b.model(), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode="tensor"))
    assert number_type(plan.analysis) == expected


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_weights_count_in_the_type_of_their_product(kind: str, tmp_path: Path) -> None:
    """Models that torch.autocast ran have float32 weights, which are cast before each product."""
    b, to = Block(), ir.DataType[kind.upper()]
    x = b.op("Cast", b.data("x", (5, 12), ["n", 12]), to=to)
    y = b.op("MatMul", x, b.op("Cast", b.op("Transpose", b.w("A", 24, 12), perm=[1, 0]), to=to))
    b.give(b.op("Cast", y, to=ir.DataType.FLOAT), shape=["n", 24])
    save(b.model(), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode="tensor"))
    assert number_type(plan.analysis) == kind


def test_existing_path_is_kept_unless_forced(decoder: Path, plan: Plan, tmp_path: Path) -> None:
    target = tmp_path / "package"
    compile_model(plan, target)
    before = (target / "manifest.json").stat().st_ino
    with pytest.raises(MisuseError, match="exists already: choose another name, or replace it with --force"):
        compile_model(plan, target)
    assert (target / "manifest.json").stat().st_ino == before
    compile_model(plan, target, force=True)
    assert (target / "manifest.json").stat().st_ino != before
    assert [path.name for path in tmp_path.iterdir()] == ["package"]


def test_force_does_not_replace_what_is_no_package(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    with pytest.raises(MisuseError, match="is no package, so --force does not replace it"):
        compile_model(plan, tmp_path / "thesis", force=True)


def test_missing_folder_is_named(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match=r"there is no folder .*none"):
        compile_model(plan, tmp_path / "none" / "package")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), RuntimeError("a bug")])
def test_interrupted_compile_leaves_nothing(plan: Plan, tmp_path: Path, error: BaseException) -> None:
    def interrupt(what: str, done: float, total: int) -> None:
        if done and what == "writing weights":
            raise error

    with pytest.raises(type(error)), listening(interrupt):
        compile_model(plan, tmp_path / "package")
    assert not list(tmp_path.iterdir())


def test_interrupted_replacement_leaves_the_old_package(plan: Plan, decoder: Path, tmp_path: Path) -> None:
    def interrupt(what: str, done: float, total: int) -> None:
        if done and what == "writing weights":
            raise KeyboardInterrupt

    compile_model(plan, tmp_path / "package")
    with pytest.raises(KeyboardInterrupt), listening(interrupt):
        compile_model(plan, tmp_path / "package", force=True)
    feeds = decoder_feeds()
    with Session(tmp_path / "package") as session:
        assert_close(session.run(feeds), run_whole(decoder, feeds))


def test_what_a_killed_run_left_is_removed_by_the_next(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / ".package.partial" / "rank0").mkdir(parents=True)
    compile_model(plan, tmp_path / "package")
    assert [path.name for path in tmp_path.iterdir()] == ["package"]


@pytest.mark.parametrize(("mode", "weights"), [("layer", "copy"), ("tensor", "link")])
def test_disk_that_is_too_small_is_noticed_before(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, weights: str
) -> None:
    """Slices of weights that are not whole rows are copied, even if others are linked."""
    plan = plan_model(decoder, ["2xcpu"], Request(split_mode=mode))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(SplitcError, match=r"has 0\.98 KiB free, and the package's weights alone take"):
        compile_model(plan, tmp_path / "package", weights=weights)
    assert not list(tmp_path.iterdir())


def test_disk_needs_no_more_than_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs hold half precision in single precision, but files do not."""
    save(build(replace(DECODER, dtype=ir.DataType.FLOAT16)), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode="layer"))
    weights, usage = least_bytes(plan), shutil.disk_usage(tmp_path)
    assert sum(rank.memory.weights for rank in plan.ranks) > 1.5 * weights
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=weights * 3 // 2))
    compile_model(plan, tmp_path / "package")


def test_disk_that_fills_up_leaves_nothing(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(file: HashedFile, _: Any) -> int:
        if file.size > 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        file.size += 1
        return 1

    monkeypatch.setattr(HashedFile, "write", write)
    with pytest.raises(SplitcError, match=r"is full \(.*\). It had .* free, and .* take .*\. Nothing was written"):
        compile_model(plan, tmp_path / "package")
    assert not list(tmp_path.iterdir())


def test_names_with_spaces_and_other_letters(decoder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mes modèles 模型"
    shutil.copytree(decoder.parent, folder)
    plan = plan_model(folder / "decoder.onnx", parse_devices(["2xcpu"]), LAYER)
    compile_model(plan, folder / "le paquet ü")
    feeds = decoder_feeds()
    with Session(folder / "le paquet ü") as session:
        assert_close(session.run(feeds), run_whole(decoder, feeds))


def test_model_that_was_linked_before_is_copied(decoder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(decoder.parent, tmp_path / "model") / decoder.name
    plan = plan_model(model, ["2xcpu"], LAYER)
    compile_model(plan, tmp_path / "linked", weights="link", verify=False)
    compile_model(plan, tmp_path / "copied", verify=False)
    assert all(file.hash for file in read_manifest(tmp_path / "copied").files)


def test_linked_weights_that_are_written_in_place_are_refused(decoder: Path, tmp_path: Path) -> None:
    """They have no hash. What the package can't know is whether a copy of it has the weights of before."""
    model = shutil.copytree(decoder.parent, tmp_path / "model") / decoder.name
    manifest = compile_model(plan_model(model, ["2xcpu"], LAYER), tmp_path / "package", weights="link", verify=False)
    (linked, *_) = (tmp_path / "package" / file.path for file in manifest.files if file.hash is None)
    with linked.open("r+b") as data:
        data.write(b"other")
    with pytest.raises(PackageError, match="is a link to the model's data, which was written to since"):
        Session(tmp_path / "package")
    with Session(shutil.copytree(tmp_path / "package", tmp_path / "copy")) as session:
        session.run(decoder_feeds())


def test_linked_weights_are_not_copied(decoder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(decoder.parent, tmp_path / "model") / decoder.name
    target = tmp_path / "linked"
    warnings: list[str] = []
    manifest = compile_model(plan_model(model, ["2xcpu"], LAYER), target, weights="link", warn=warnings.append)
    data = model.with_name("decoder.onnx.data")
    for number in (0, 1):
        assert (target / f"rank{number}" / "source0.weights").samefile(data)
    assert sum(file.bytes for file in manifest.files if file.hash) < 0.5 * data.stat().st_size
    assert not warnings
    feeds = decoder_feeds()
    with Session(target) as session:
        assert_close(session.run(feeds), run_whole(decoder, feeds))
    shutil.rmtree(target)
    assert data.exists()


def test_links_that_cannot_be_are_copied_and_said_so(
    decoder: Path, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr("os.link", link)
    warnings: list[str] = []
    manifest = compile_model(plan, tmp_path / "package", weights="link", warn=warnings.append)
    assert len(warnings) == 2
    assert "rank 0 has a copy" in warnings[0]
    assert all(file.hash for file in manifest.files)
    feeds = decoder_feeds()
    with Session(tmp_path / "package") as session:
        assert_close(session.run(feeds), run_whole(decoder, feeds))


def test_linked_weights_inside_the_model_file_are_written(decoder: Path, tmp_path: Path) -> None:
    """A model without external data has nothing to link to."""
    model = ir.load(decoder)
    ir.external_data.load_to_model(model)
    ir.save(model, tmp_path / "inside.onnx")
    inside = plan_model(tmp_path / "inside.onnx", parse_devices(["2xcpu"]), LAYER)
    compile_model(inside, tmp_path / "package", weights="link")
    feeds = decoder_feeds()
    with Session(tmp_path / "package") as session:
        assert_close(session.run(feeds), run_whole(decoder, feeds))


def test_one_file_a_weight_in_folders_below(decoder: Path, tmp_path: Path) -> None:
    """Thousands of external files, as some exporters write them, some in sub-folders."""
    model = ir.load(decoder)
    for number, value in enumerate(model.graph.initializers.values()):
        tensor = value.const_value
        assert tensor is not None
        folder = tmp_path / f"part {number % 3}" / "ü"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"part {number % 3}/ü/{number}.bin"
        (tmp_path / name).write_bytes(tensor.tobytes())
        value.const_value = ir.ExternalTensor(
            name,
            0,
            tensor.nbytes,
            tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=value.name or "",
            base_dir=tmp_path,
        )
    ir.save(model, tmp_path / "model.onnx")
    feeds = decoder_feeds()
    plan = plan_model(tmp_path / "model.onnx", parse_devices(["2xcpu"]), LAYER)
    for weights in ("copy", "link"):
        compile_model(plan, tmp_path / weights, weights=weights)
        with Session(tmp_path / weights) as session:
            assert_close(session.run(feeds), run_whole(decoder, feeds))


@needs_caches
def test_made_up_caches_of_two_lengths_are_not_compared(decoder: Path, tmp_path: Path) -> None:
    """As torch.export names them: each cache has its own symbol, and the package takes one length."""
    proto = onnx.load(decoder)
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1  # with no rows to divide, nothing ran the model first
        if value.name.startswith("past") and value.name.endswith("value"):
            value.type.tensor_type.shape.dim[2].dim_param = f"length of {value.name}"
    onnx.save(proto, tmp_path / "model.onnx")
    compile_model(plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode="tensor")), tmp_path / "package")
    assert read_manifest(tmp_path / "package").lengths


def test_notes_of_exporters_stay_out_of_engines(decoder: Path, tmp_path: Path) -> None:
    """Sessions would hold the metadata, a tenth of a small denoiser's memory."""
    model = onnx.load(decoder, load_external_data=False)
    items: list[Any] = [*model.graph.node, *model.graph.value_info, *model.graph.initializer, *model.graph.input]
    for item in items:
        item.doc_string = "line 7"
        item.metadata_props.add(key="scope", value="layer")
    noted = decoder.with_name("noted.onnx")
    noted.write_bytes(model.SerializeToString())
    compile_model(plan_model(noted, ["cpu0"], LAYER), tmp_path / "package", verify=False)
    written = (tmp_path / "package/rank0/stage0.onnx").read_bytes()
    assert b"line 7" not in written and b"scope" not in written


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"threads": 0}, "--threads 0: it is a number for each CPU device from 1 to 1,024"),
        ({"threads": "2"}, "--threads '2': it is a number"),
        ({"jobs": -1}, "--jobs -1: it is a number from 1 on"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(
    decoder: Path, tmp_path: Path, numbers: dict[str, Any], message: str
) -> None:
    with pytest.raises(MisuseError, match=message):
        compile_model(plan_model(decoder, "cpu0", Request()), tmp_path / "package", **numbers)
    assert not (tmp_path / "package").exists()
