"""Packages of TensorRT-RTX engines, which are built without a GPU: their files, and messages if a build fails."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from msgspec.structs import replace

from models.llama import Size, build
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.packaging.build_messages import Job
from splitc.compiler.packaging.building import BuildError, BuildSettings, build_package
from splitc.compiler.packaging.refusals import describe_refusals
from splitc.compiler.packaging.tensorrt_builder import Processes, divide_jobs
from splitc.runtime.engines.built_here import check_built_here
from splitc.runtime.engines.kind import EngineKind
from splitc.runtime.engines.kinds import choose_engine
from splitc.runtime.errors import MisuseError, PackageError
from splitc.runtime.hardware.devices import parse_devices
from splitc.runtime.package.manifest import BuildOptions, Manifest
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.package.steps import Reduce
from splitc.runtime.package.verification import verify_files
from splitc.runtime.threads.progress import listening
from tests.conftest import DECODER, decoder_feeds
from tests.helpers.command import splitc

RTX = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX builds engines without a GPU")
KIND = "tensorrt-rtx"
LAYERS = 1
LATER = BuildSettings(later=True)


def shapes_of(new: int, past: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the feeds of the short decoder."""
    whole = {name: array.shape for name, array in decoder_feeds(1, new, past).items()}
    layers = [f"past_key_values.{layer}." for layer in range(LAYERS, DECODER.layers)]
    return {name: shape for name, shape in whole.items() if not name.startswith(tuple(layers))}


@pytest.fixture(scope="module")
def short_decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The decoder with fewer layers: engines take long to build."""
    path = tmp_path_factory.mktemp("short") / "decoder.onnx"
    save(build(dataclasses.replace(DECODER, layers=LAYERS)), path)
    return path


def compile_here(
    model: Path, package: Path, mode: str, build: BuildSettings = BuildSettings(), jobs: int = 1
) -> Manifest:
    """Compile for two GPUs, in one process by default: each takes longer to start than an engine to build."""
    request = Request(split_mode=mode, engine=KIND, shapes=shapes_of(1, 8), memory=["1GiB"])
    return compile_model(plan_model(model, ["2xcuda"], request), package, build=build, jobs=jobs)


@pytest.fixture(scope="module")
def stages(short_decoder: Path) -> tuple[Path, Manifest]:
    """A package in layer mode, and the output of its compile."""
    package = short_decoder.with_name("stages")
    return package, compile_here(short_decoder, package, "layer", jobs=2)


def test_stages_are_engines(stages: tuple[Path, Manifest]) -> None:
    package, manifest = stages
    assert manifest == read_manifest(package)
    assert manifest.engine == KIND
    assert manifest.build is not None and manifest.build.built is not None
    assert manifest.build.built.version == RTX.__version__
    verify_files(package, manifest.files)
    paths = [engine.path for rank in manifest.ranks for engine in rank.engines]
    assert paths == ["rank0/stage0.engine", "rank1/stage1.engine"]
    assert sorted(file.path for file in manifest.files) == paths, "and nothing of what they were built from"
    for rank, path in zip(manifest.ranks, paths):
        assert (package / path).stat().st_size > 0.9 * rank.weights_bytes
    (ids,) = [tensor for tensor in manifest.inputs if tensor.name == "input_ids"]
    assert (ids.min_shape, ids.max_shape) == ([1, 1], [1, 1])


def test_tensor_mode_is_one_engine_a_rank_with_collectives_inside(short_decoder: Path, tmp_path: Path) -> None:
    """And what keeps its sources is built again as it was."""
    package = tmp_path / "package"
    manifest = compile_here(short_decoder, package, "tensor", BuildSettings(keep_sources=True))
    for number, rank in enumerate(manifest.ranks):
        (engine,) = rank.engines
        assert engine.path == f"rank{number}/model.plan.rank{number}", "as Triton's per-rank layout names it"
        assert engine.group == [0, 1]
        assert not [step for step in rank.program if isinstance(step, Reduce)]
        nodes = [node.op_type for node in ir.load(package / str(engine.source)).graph]
        assert nodes.count("DistCollective") == manifest.collectives == 2 * LAYERS
    again = build_package(package, jobs=1)
    assert [rank.engines for rank in again.ranks] == [rank.engines for rank in manifest.ranks]


def test_what_is_written_later_is_built_where_it_runs(
    short_decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without collectives inside: there are sums between engines, all of which are built."""
    monkeypatch.setattr("splitc.compiler.lowering.segments.has_collectives", lambda *_: False)
    package = tmp_path / "package"
    manifest = compile_here(short_decoder, package, "tensor", LATER)
    for rank in manifest.ranks:
        assert len(rank.engines) == 2 * LAYERS + 1
        assert len([step for step in rank.program if isinstance(step, Reduce)]) == 2 * LAYERS
    assert manifest.build is not None and manifest.build.built is None
    assert not list(package.rglob("*.engine")) and not list(package.rglob("model.plan*"))
    before = {path: path.stat().st_mtime_ns for path in package.rglob("*.onnx")}
    told: list[tuple[float, int]] = []
    with listening(lambda what, done, total: told.append((done, total)) if what == "building engines" else None):
        built = build_package(package)
    assert built.build is not None and built.build.built is not None
    assert built == read_manifest(package)
    count = 2 * (2 * LAYERS + 1)
    assert told[0] == (0, count) and told[-1] == (count, count) and told == sorted(told)
    verify_files(package, built.files)
    assert all((package / engine.path).is_file() for rank in built.ranks for engine in rank.engines)
    assert {path: path.stat().st_mtime_ns for path in package.rglob("*.onnx")} == before
    assert [path.name for path in tmp_path.iterdir()] == ["package"]


def test_range_of_sizes_is_what_the_engine_takes(short_decoder: Path, tmp_path: Path) -> None:
    low = shapes_of(1, 0)
    high = shapes_of(8, 32)
    request = Request(split_mode="layer", engine=KIND, min_shapes=low, max_shapes=high, memory=["1GiB"])
    manifest = compile_model(plan_model(short_decoder, ["cuda0"], request), tmp_path / "package")
    ids = next(tensor for tensor in manifest.inputs if tensor.name == "input_ids")
    assert (ids.min_shape, ids.sample_shape, ids.max_shape) == ([1, 1], [1, 8], [1, 8])
    ((engine,),) = [rank.engines for rank in manifest.ranks]
    assert engine.sizes["past_key_values.0.key"].shapes[2][2] == 32


def test_node_that_the_parser_refuses_is_named_with_its_block(tmp_path: Path) -> None:
    model = tmp_path / "experts.onnx"
    save(build(Size(layers=2, hidden=64, heads=4, kv_heads=2, feed_forward=32, vocabulary=64)), model)
    broken = tmp_path / "broken.onnx"
    replace_operator(model, broken)
    with pytest.raises(BuildError, match=r"layers\.\d: '.*' \(com\.microsoft\.FastGelu\)") as caught:
        compile_model(
            plan_model(broken, ["2xcuda"], Request(split_mode="layer", engine=KIND, memory=["1GiB"])),
            tmp_path / "package",
            jobs=1,
        )
    assert "rank0/stage0.onnx (rank 0, cuda0, prologue to layers.0)" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == []
    plan = plan_model(broken, ["2xcuda"], Request(split_mode="layer", engine=KIND, memory=["1GiB"]))
    (line,) = describe_refusals(plan)
    assert line.startswith("tensorrt-rtx does not take com.microsoft.FastGelu (2 nodes in layers.0..layers.1 (2)")


def replace_operator(model: Path, target: Path) -> None:
    """Put an operator that TensorRT lacks where a block has its Sigmoid."""
    loaded = ir.load(model)
    for node in loaded.graph:
        if node.op_type == "Sigmoid":
            node.op_type, node.domain = "FastGelu", "com.microsoft"
    loaded.graph.opset_imports["com.microsoft"] = 1
    ir.save(loaded, target)


def test_plan_says_what_was_not_checked(short_decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_model(short_decoder, ["2xcuda"], Request(split_mode="layer", engine="tensorrt", memory=["1GiB"]))
    monkeypatch.setattr(EngineKind, "is_installed", False)
    (line,) = describe_refusals(plan)
    assert line == "which operators tensorrt takes was not checked: it is not installed here (pip install tensorrt)"


def test_process_starts_without_what_takes_long_to_import() -> None:
    program = "import splitc.compiler.packaging.tensorrt_process, sys; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert {"onnx", "onnx_ir", "sympy", "polygraphy"}.isdisjoint(found.stdout.split())


def test_process_that_dies_is_named(short_decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hard failure in TensorRT ends its process."""
    start = subprocess.Popen

    def start_and_kill(command: list[str], **options: object) -> object:
        process = start(command, **options)  # type: ignore[call-overload]
        if "splitc.compiler.packaging.tensorrt_process" in command[-1]:
            os.kill(process.pid, signal.SIGKILL)
        return process

    monkeypatch.setattr(subprocess, "Popen", start_and_kill)
    with pytest.raises(BuildError, match=r"ended by SIGKILL \(out of host memory, most likely\).*rank\d/stage\d.onnx"):
        compile_here(short_decoder, tmp_path / "package", "layer")
    assert not list(tmp_path.iterdir())


def test_engines_are_built_at_once_and_end_together(
    short_decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second process is let wait for an order, and the first one fails meanwhile."""
    started: list[subprocess.Popen[bytes]] = []
    start = Processes.start

    def start_one_that_fails(self: Processes, command: list[str], *rest: Any) -> subprocess.Popen[bytes]:
        program = "raise SystemExit('it fails')" if not started else "import time; time.sleep(60)"
        started.append(start(self, [*command[:-1], program], *rest))
        return started[-1]

    monkeypatch.setattr(Processes, "start", start_one_that_fails)
    with pytest.raises(BuildError, match=r"ended with exit code 1 while it built .*\nit fails"):
        compile_here(short_decoder, tmp_path / "package", "layer", jobs=2)
    assert len(started) == 2 and all(process.poll() is not None for process in started)
    assert not list(tmp_path.iterdir())


def test_as_many_engines_at_once_as_there_is_memory_for(short_decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes(at_once: int, free: int, gpus: int | None = None) -> list[list[int]]:
        monkeypatch.setattr("splitc.compiler.packaging.tensorrt_builder.host_memory", lambda: (free, free))
        return [[job.gpu for job in part] for part in divide_jobs(jobs, at_once, gpus)]

    jobs = [Job(str(short_decoder), None, {}, "", gpu) for gpu in (0, 1, 0, 1)]
    assert sizes(3, 64 << 30) == [[0, 1], [1], [0]]
    assert sizes(8, 64 << 30, gpus=2) == [[0, 0], [1, 1]], "kernels are measured on one GPU at a time"
    assert sizes(8, 64 << 30, gpus=1) == [[0, 1, 0, 1]]
    assert sizes(8, 2 * (1 << 30) + (1 << 28)) == [[0, 0], [1, 1]]
    assert sizes(8, 1) == [[0, 1, 0, 1]]


def test_packages_that_can_not_be_built_are_refused(stages: tuple[Path, Manifest], package: Path) -> None:
    with pytest.raises(MisuseError, match="onnxruntime engines, which are ONNX files"):
        build_package(package)
    with pytest.raises(MisuseError, match="does not hold the ONNX files"):
        build_package(stages[0])


def test_engines_of_another_version_or_gpu_are_refused(
    stages: tuple[Path, Manifest], short_decoder: Path, tmp_path: Path
) -> None:
    _, manifest = stages
    devices = parse_devices(["2xcuda"])
    check_built_here(tmp_path, manifest, devices)
    assert manifest.build is not None and manifest.build.built is not None
    older = replace(manifest.build, built=replace(manifest.build.built, version="1.0.0"))
    with pytest.raises(
        PackageError, match=f"built with tensorrt-rtx 1.0.0, and this machine has {RTX.__version__}.*compile"
    ):
        check_built_here(tmp_path, replace(manifest, build=older), devices)
    lenient = replace(older, options=BuildOptions(version_compatible=True))
    check_built_here(tmp_path, replace(manifest, build=lenient), devices)
    with pytest.raises(PackageError, match="not built yet: run 'splitc build"):
        check_built_here(tmp_path, compile_here(short_decoder, tmp_path / "later", "layer", LATER), devices)


def test_engines_go_with_devices() -> None:
    with pytest.raises(MisuseError, match=r"runs on GPUs .*, and cpu1 is none"):
        choose_engine("tensorrt", parse_devices(["cuda0", "cpu1"]))
    with pytest.raises(MisuseError, match="there are onnxruntime, tensorrt, tensorrt-rtx"):
        choose_engine("openvino", parse_devices(["cpu0"]))
    assert choose_engine(None, parse_devices(["cpu0"])) == "onnxruntime"
    assert choose_engine(None, parse_devices(["cpu0", "cuda0"])) == "onnxruntime"


def test_commands_build_later(short_decoder: Path, tmp_path: Path) -> None:
    package = tmp_path / "package"
    common = ("-d", "2xcuda", "--engine", KIND, "--memory", "1GiB", "--shapes", "input_ids:1x4")
    later = splitc("compile", short_decoder, "-o", package, *common, "--split-mode", "layer", "--build", "later")
    assert "does not take" not in later.stderr
    assert f"run 'splitc build {package}'" in later.stdout.replace("\n", " ")
    assert "not built yet" in splitc("inspect", package).stdout
    assert "are not built yet" in splitc("check", package, "-m", short_decoder, code=1).stderr
    assert "built 2 engines with tensorrt-rtx" in splitc("build", package, "--jobs", 1).stdout
    assert json.loads(splitc("inspect", package, "--json").stdout)["build"]["built"]["version"] == RTX.__version__
    assert "TensorRT-RTX runs on GPUs" in splitc("check", package, "-m", short_decoder, "-d", "2xcpu", code=2).stderr
