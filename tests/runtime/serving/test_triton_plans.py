"""TensorRT's plans for Triton's own backend, as they are written: engines of TensorRT-RTX stand in for TensorRT's.

Both have the same files and the same manifest. Those of TensorRT are only built where its GPU is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime.errors import MisuseError
from splitc.runtime.package.manifest import BuildOptions, Manifest, Part, Tensor
from splitc.runtime.package.manifest_file import FILE_NAME, encode, read_manifest
from splitc.runtime.package.steps import Reduce
from splitc.runtime.serving.triton_ensemble import export_ensemble
from splitc.runtime.serving.triton_plans import find_plans, plans_config
from tests.helpers.blocks import Block
from tests.helpers.command import splitc


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model whose inputs and outputs are whole on all ranks."""
    path = tmp_path_factory.mktemp("plans") / "model.onnx"
    b = Block()
    x = b.data("x", (2, 16), ["n", 16])
    for layer in range(2):
        wide = b.op("Relu", b.op("MatMul", x, b.w(f"up{layer}", 16, 64)))
        x = b.op("Add", x, b.op("MatMul", wide, b.w(f"down{layer}", 64, 16)))
    b.give(b.op("Tanh", x))
    save(b.model(), path)
    return path


@pytest.fixture(scope="module")
def built(model: Path) -> Callable[[str], Path]:
    """The model's package on two GPUs in a split mode, as TensorRT 11 would have built it."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX builds engines without a GPU")

    def build(mode: str) -> Path:
        package = model.with_name(mode)
        if not package.exists():
            request = Request(split_mode=mode, engine="tensorrt-rtx", memory=["1GiB"], spread=True)
            made = compile_model(plan_model(model, ["2xcuda"], request), package)
            assert made.build is not None and made.build.built is not None
            build = replace(made.build, built=replace(made.build.built, version="11.1.0.106"))
            (package / FILE_NAME).write_bytes(encode(replace(made, engine="tensorrt", build=build)))
        return package

    return build


def parsed(config: str) -> Any:
    """The config as Triton reads it."""
    grpc = pytest.importorskip("tritonclient.grpc", reason="its messages are Triton's")
    from google.protobuf import text_format

    return text_format.Parse(config, grpc.model_config_pb2.ModelConfig())


def test_ranks_are_the_plans_of_one_model(built: Callable[[str], Path], tmp_path: Path) -> None:
    package = built("tensor")
    splitc("export", "triton", package, "-o", tmp_path, "--name", "mlp", "--plans")
    assert (tmp_path / "mlp" / "config.pbtxt").read_text() == (
        'name: "mlp"\n'
        'backend: "tensorrt"\n'
        "max_batch_size: 0\n"
        'input { name: "x" data_type: TYPE_FP32 dims: [ -1, 16 ] }\n'
        'output { name: "y" data_type: TYPE_FP32 dims: [ -1, 16 ] }\n'
        "instance_group { kind: KIND_MODEL count: 1 }\n"
        'parameters { key: "enable_multi_device" value { string_value: "true" } }\n'
        'parameters { key: "multi_device_gpus" value { string_value: "0,1" } }\n'
        'parameters { key: "multi_device_per_rank_engines" value { string_value: "true" } }\n'
    )
    version = tmp_path / "mlp" / "1"
    files = {"model.plan": 0, "model.plan.rank0": 0, "model.plan.rank1": 1}
    assert {path.name for path in version.iterdir()} == set(files)
    for name, rank in files.items():
        assert (version / name).samefile(package / f"rank{rank}" / f"model.plan.rank{rank}")


def test_triton_reads_the_config(model: Path) -> None:
    """ONNX Runtime's engines are used here: the config does not say what the ranks run."""
    manifest = compile_model(plan_model(model, ["2xcpu"], Request(split_mode="tensor")), model.with_name("cpu"))
    moved = [replace(rank, device=device) for rank, device in zip(manifest.ranks, ("cuda3", "cuda1"))]
    config = parsed(plans_config("mlp", replace(manifest, ranks=moved)))
    assert {key: each.string_value for key, each in config.parameters.items()} == {
        "enable_multi_device": "true",
        "multi_device_gpus": "3,1",
        "multi_device_per_rank_engines": "true",
    }
    assert [(each.name, list(each.dims)) for each in (*config.input, *config.output)] == [
        ("x", [-1, 16]),
        ("y", [-1, 16]),
    ]
    assert [group.kind for group in config.instance_group] == [config.instance_group[0].KIND_MODEL]


def test_stages_are_models_of_an_ensemble(built: Callable[[str], Path], tmp_path: Path) -> None:
    package = built("layer")
    export_ensemble(package, tmp_path, module=None, name="mlp")
    assert (tmp_path / "mlp_stage1" / "config.pbtxt").read_text() == (
        'name: "mlp_stage1"\nbackend: "tensorrt"\nmax_batch_size: 0\n'
        'default_model_filename: "stage1.engine"\ninstance_group { kind: KIND_GPU count: 1 gpus: [ 1 ] }\n'
    )
    (stage,) = (tmp_path / "mlp_stage1" / "1").iterdir()
    assert stage.samefile(package / "rank1" / "stage1.engine")
    assert 'model_name: "mlp_stage1"' in (tmp_path / "mlp" / "config.pbtxt").read_text()


def changed(manifest: Manifest, **rank: Any) -> Manifest:
    """The manifest with another first rank."""
    return replace(manifest, ranks=[replace(manifest.ranks[0], **rank), *manifest.ranks[1:]])


def test_what_the_backend_can_not_run_is_refused(built: Callable[[str], Path], tmp_path: Path) -> None:
    found = splitc("export", "triton", built("layer"), "-o", tmp_path / "r", "--plans", code=2)
    assert "some ranks are stages" in found.stderr and "use --ensemble" in found.stderr
    assert not (tmp_path / "r").exists(), "nothing half written"
    found = splitc("export", "triton", built("tensor"), "-o", tmp_path / "r", "--plans", "--batch", 2, code=2)
    assert "--batch has no effect with --plans" in found.stderr
    whole = read_manifest(built("tensor"))
    (engine,), build = whole.ranks[0].engines, whole.build
    assert build is not None and build.built is not None
    wrong = {
        "this package has tensorrt-rtx's": replace(whole, engine="tensorrt-rtx"),
        "are not built yet: run 'splitc build'": replace(whole, build=replace(build, built=None)),
        "TensorRT 11 or later here, and these are of 10.16.1": replace(
            whole, build=replace(build, built=replace(build.built, version="10.16.1"))
        ),
        "have no weights": replace(whole, build=replace(build, options=BuildOptions(strip_weights=True))),
        "the collectives are between the engines": changed(whole, program=[Reduce("sum", ["a"], ["b"], [0, 1])]),
        "ranks that are one group": changed(whole, engines=[replace(engine, group=[0])]),
        "the ranks have shards of 'x', an input": changed(whole, parts=[Part("x", [])]),
        "the ranks have shards of 'y', an output": changed(whole, parts=[Part("y", [])]),
        "rank 1 takes other inputs than rank 0": changed(whole, engines=[replace(engine, inputs=["z"])]),
        "the first rank's plan does not have 'y'": changed(whole, engines=[replace(engine, outputs=["z"])]),
    }
    for said, manifest in wrong.items():
        with pytest.raises(MisuseError, match=said):
            find_plans(manifest)
    with pytest.raises(MisuseError, match="--plans needs a GPU for each rank, all on one machine, and these are cuda1"):
        plans_config("m", changed(whole, device="cuda1"))
    with pytest.raises(MisuseError, match="'t' is a scalar, which Triton's own backends can't have: leave out --plans"):
        plans_config("m", replace(whole, inputs=[*whole.inputs, Tensor("t", "float32", [])]))
