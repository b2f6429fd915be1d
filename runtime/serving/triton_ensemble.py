"""A package's stages as models of Triton's own ONNX Runtime backend, and an ensemble that runs them as one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from splitc.runtime.counted import counted
from splitc.runtime.devices import parse_devices
from splitc.runtime.errors import MisuseError
from splitc.runtime.files import link_file
from splitc.runtime.manifest import EngineFile, Manifest, Rank
from splitc.runtime.package_files import files_of
from splitc.runtime.serving.interface import Interface, find_interface
from splitc.runtime.serving.served_folders import find_packages, new_models
from splitc.runtime.serving.stage_engines import find_stages
from splitc.runtime.serving.triton_config import quoted, tensor_lines


def export_ensemble(package: Path, repository: Path, *, module: str | None, name: str | None) -> list[Path]:
    """Write an ensemble and a model for each stage into the repository. Returns the models' folders.

    States are fed and given. All are written, or none. Raises MisuseError for a package without stages, for tensors
    that Triton can't have, and for a model that is there.
    """
    models: dict[str, tuple[Path, Manifest, int | None]] = {}
    for known, (source, manifest) in find_packages(package, module, name).items():
        models[known] = source, manifest, None
        models.update({stage_name(known, n): (source, manifest, n) for n in range(len(manifest.ranks))})
    with new_models(repository, models) as folders:
        for folder, (known, (source, manifest, number)) in zip(folders, models.items(), strict=True):
            (folder / "1").mkdir()
            if number is None:
                config = ensemble_config(known, manifest)
            else:
                engine = find_stages(manifest, "Triton")[number]
                config = stage_config(known, manifest.ranks[number], engine)
                for file in counted(f"writing files of {known}", files_of(manifest, number)):
                    link_file(source / file.path, folder / "1" / Path(file.path).name)
            (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    return [repository / known for known in models]


def stage_name(name: str, number: int) -> str:
    """The name of a stage's model."""
    return f"{name}_stage{number}"


def stage_config(name: str, rank: Rank, engine: EngineFile) -> str:
    """The config of a stage, on its device. Triton reads its tensors off the ONNX file."""
    (device,) = parse_devices([rank.device])
    place = f"kind: KIND_GPU count: 1 gpus: [ {device.index} ]" if device.kind == "cuda" else "kind: KIND_CPU count: 1"
    lines = [
        f"name: {quoted(name)}",
        'backend: "onnxruntime"',
        "max_batch_size: 0",
        f"default_model_filename: {quoted(Path(engine.path).name)}",
        f"instance_group {{ {place} }}",
    ]
    return "\n".join(lines) + "\n"


def ensemble_config(name: str, manifest: Manifest) -> str:
    """The config of the ensemble. Raises MisuseError for what an ensemble can't have."""
    stages = find_stages(manifest, "Triton")
    interface = find_interface(manifest, sequences=False)
    _check(interface)
    lines = [f"name: {quoted(name)}", 'platform: "ensemble"', "max_batch_size: 0"]
    lines += tensor_lines(Interface(interface.inputs, [], interface.outputs))
    steps = ", ".join(_steps(name, stages))
    return "\n".join([*lines, f"ensemble_scheduling {{ step [ {steps} ] }}"]) + "\n"


def _steps(name: str, stages: list[EngineFile]) -> Iterator[str]:
    for number, stage in enumerate(stages):
        maps = [("input_map", each) for each in stage.inputs] + [("output_map", each) for each in stage.outputs]
        mapped = " ".join(f"{kind} {{ key: {quoted(each)} value: {quoted(each)} }}" for kind, each in maps)
        yield f"{{ model_name: {quoted(stage_name(name, number))} model_version: -1 {mapped} }}"


def _check(interface: Interface) -> None:
    names = {tensor.name for tensor in interface.inputs}
    for tensor in (*interface.inputs, *interface.outputs):
        if tensor.shape == []:
            raise MisuseError(f"'{tensor.name}' is a scalar, which ensembles can't have: leave out --ensemble")
    if passed := [tensor.name for tensor in interface.outputs if tensor.name in names]:
        raise MisuseError(f"'{passed[0]}' is an input and an output, which ensembles can't have: leave out --ensemble")
