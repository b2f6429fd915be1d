"""A package's stages as models of Triton's own ONNX Runtime or TensorRT backend, and an ensemble that runs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from splitc.runtime.engines.kinds import ONNXRUNTIME, TENSORRT
from splitc.runtime.hardware.devices import device_named
from splitc.runtime.package.files import files_of
from splitc.runtime.package.manifest import EngineFile, Manifest, Rank
from splitc.runtime.serving.served_folders import ServedModel, find_models, new_models
from splitc.runtime.serving.stage_engines import WITH_INT64, check_loadable, find_stages, write_stage_file
from splitc.runtime.serving.triton_config import config_text, native_lines, quoted
from splitc.runtime.threads.progress import counted

OPTION = "--ensemble"


def export_ensemble(package: Path, repository: Path, *, module: str | None, name: str | None) -> list[Path]:
    """Write an ensemble, and a model for each stage, into the repository. Returns the models' folders.

    Clients feed states and get them back. Either all models are written or none. Raises MisuseError for a package
    without stages, for tensors that Triton does not support, and for a model that exists.
    """
    written: dict[str, tuple[ServedModel, int | None]] = {}
    for model in find_models(package, module, name):
        written[model.name] = model, None
        written.update({stage_name(model.name, n): (model, n) for n in range(len(model.manifest.ranks))})
    with new_models(repository, written) as folders:
        for folder, (known, (model, number)) in zip(folders, written.items(), strict=True):
            manifest = model.manifest
            (folder / "1").mkdir()
            if number is None:
                config = ensemble_config(known, manifest)
            else:
                engine = _stages(manifest)[number]
                config = stage_config(known, manifest.ranks[number], engine, manifest.engine)
                has_weights = manifest.engine == TENSORRT  # not the ONNX file that it was built from
                paths = [engine.path] if has_weights else [file.path for file in files_of(manifest, number)]
                for path in counted(f"writing files of {known}", paths):
                    write_stage_file(manifest, model.package / path, folder / "1" / Path(path).name)
            (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    return [repository / known for known in written]


def stage_name(name: str, number: int) -> str:
    """The name of a stage's model."""
    return f"{name}_stage{number}"


def _stages(manifest: Manifest) -> list[EngineFile]:
    """The stages' engines. Raises MisuseError for engines that Triton's backends can't run."""
    stages = find_stages(manifest, "Triton", (ONNXRUNTIME, TENSORRT))
    if manifest.engine == TENSORRT:
        check_loadable(manifest, WITH_INT64, OPTION)
    return stages


def stage_config(name: str, rank: Rank, engine: EngineFile, kind: str = ONNXRUNTIME) -> str:
    """The config of a stage, on its device. Triton reads its tensors from the file."""
    device = device_named(rank.device)
    place = f"kind: KIND_GPU count: 1 gpus: [ {device.index} ]" if device.kind == "cuda" else "kind: KIND_CPU count: 1"
    file = f"default_model_filename: {quoted(Path(engine.path).name)}"
    return config_text(name, f'backend: "{kind}"', file, f"instance_group {{ {place} }}")


def ensemble_config(name: str, manifest: Manifest) -> str:
    """The config of the ensemble. Raises MisuseError for a tensor that ensembles do not support."""
    stages = _stages(manifest)
    lines = native_lines(manifest, OPTION)
    steps = ", ".join(_steps(name, stages))
    return config_text(name, 'platform: "ensemble"', *lines, f"ensemble_scheduling {{ step [ {steps} ] }}")


def _steps(name: str, stages: list[EngineFile]) -> Iterator[str]:
    for number, stage in enumerate(stages):
        maps = [("input_map", value) for value in stage.inputs] + [("output_map", value) for value in stage.outputs]
        mapped = " ".join(f"{kind} {{ key: {quoted(value)} value: {quoted(value)} }}" for kind, value in maps)
        yield f"{{ model_name: {quoted(stage_name(name, number))} model_version: -1 {mapped} }}"
