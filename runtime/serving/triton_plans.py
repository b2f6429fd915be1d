"""A package's ranks as one model of Triton's TensorRT backend: a plan for each rank, with the collectives inside.

The backend copies a request's inputs to all ranks' GPUs, runs all plans at the same time, connected by NCCL, and
answers with the outputs of the first one (`docs/multi_device.md` of triton-inference-server/tensorrt_backend).
"""

from __future__ import annotations

from pathlib import Path

from splitc.runtime.errors import MisuseError
from splitc.runtime.files.written import link_file
from splitc.runtime.hardware.devices import parse_devices
from splitc.runtime.package.manifest import EngineFile, Manifest
from splitc.runtime.package.steps import Receive, Reduce, Send
from splitc.runtime.serving.served_folders import find_models, new_models
from splitc.runtime.serving.stage_engines import WITH_RANKS, check_loadable, check_one_copy
from splitc.runtime.serving.triton_config import config_text, native_lines
from splitc.runtime.threads.progress import counted

OPTION = "--plans"
# The backend derives the names of the ranks' plans from the model's plan file, which Triton looks for.
PLAN = "model.plan"


def export_plans(package: Path, repository: Path, *, module: str | None, name: str | None) -> list[Path]:
    """Write a model for the package, or each of its modules, into the repository. Returns the models' folders.

    Clients feed states and get them back. Either all models are written or none. Raises MisuseError for a package that
    the backend can't run, and for a model that exists.
    """
    models = find_models(package, module, name)
    with new_models(repository, [model.name for model in models]) as folders:
        for folder, model in zip(folders, models, strict=True):
            plans = find_plans(model.manifest)
            (folder / "config.pbtxt").write_text(plans_config(model.name, model.manifest), encoding="utf-8")
            version = folder / "1"
            version.mkdir()
            for number, plan in enumerate(counted(f"writing files of {model.name}", plans)):
                link_file(model.package / plan.path, version / f"{PLAN}.rank{number}")
            link_file(model.package / plans[0].path, version / PLAN)
    return [repository / model.name for model in models]


def plans_config(name: str, manifest: Manifest) -> str:
    """The text of `config.pbtxt`. Raises MisuseError for tensors that Triton lacks, and for ranks on one device."""
    lines = native_lines(manifest, OPTION)
    parameters = {
        "enable_multi_device": "true",
        "multi_device_gpus": ",".join(map(str, _gpus(manifest))),
        "multi_device_per_rank_engines": "true",
    }
    lines += [
        "instance_group { kind: KIND_MODEL count: 1 }",
        *(f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}' for key, text in parameters.items()),
    ]
    return config_text(name, 'backend: "tensorrt"', *lines)


def find_plans(manifest: Manifest) -> list[EngineFile]:
    """The ranks' plans, in order. Raises MisuseError, with the reason, for a package that the backend can't run."""
    check_one_copy(manifest, "Triton's TensorRT backend", "tensor")
    check_loadable(manifest, WITH_RANKS, OPTION)
    steps = [step for rank in manifest.ranks for step in rank.program]
    if any(isinstance(step, Reduce) for step in steps):
        raise MisuseError(
            "the collectives are between the engines, which Triton's TensorRT backend can't run: compile with TensorRT "
            f"{WITH_RANKS}, whose engines have them inside, or leave out {OPTION}"
        )
    if any(isinstance(step, Send | Receive) for step in steps):
        raise MisuseError(
            "some ranks are stages that follow others, and Triton's TensorRT backend runs all plans at the same time: "
            f"use --ensemble for --split-mode layer, or leave out {OPTION}"
        )
    everyone = list(range(len(manifest.ranks)))
    if any(len(rank.engines) != 1 or sorted(rank.engines[0].group) != everyone for rank in manifest.ranks):
        raise MisuseError(
            "Triton's TensorRT backend runs ranks that are one group, with one plan each, and these are not: compile "
            f"with --split-mode tensor on two GPUs or more, or leave out {OPTION}"
        )
    _check_whole(manifest)
    return [rank.engines[0] for rank in manifest.ranks]


def _check_whole(manifest: Manifest) -> None:
    """Raise MisuseError unless each rank takes all inputs unsharded, and the first returns all outputs unsharded."""
    if cut := [part.name for rank in manifest.ranks for part in rank.parts]:
        what = "an input" if cut[0] in {tensor.name for tensor in manifest.inputs} else "an output"
        raise MisuseError(
            f"the ranks have shards of '{cut[0]}', {what}: Triton's TensorRT backend feeds whole inputs to all ranks, "
            f"and returns the first rank's outputs. Leave out {OPTION}: its Python backend serves the package"
        )
    first = manifest.ranks[0].engines[0]
    for number, rank in enumerate(manifest.ranks):
        if set(rank.engines[0].inputs) != set(first.inputs):
            raise MisuseError(
                f"rank {number} takes other inputs than rank 0, and Triton's TensorRT backend feeds all the same: "
                f"leave out {OPTION}"
            )
    for tensors, known in ((manifest.inputs, first.inputs), (manifest.outputs, first.outputs)):
        if missing := [tensor.name for tensor in tensors if tensor.name not in known]:
            raise MisuseError(
                f"the first rank's plan does not have '{missing[0]}', and Triton's TensorRT backend returns the "
                f"outputs of that rank: leave out {OPTION}"
            )


def _gpus(manifest: Manifest) -> list[int]:
    """The numbers of the ranks' GPUs. Raises MisuseError unless each rank has its own, all on one machine."""
    devices = parse_devices([rank.device for rank in manifest.ranks])
    if len({device.host for device in devices}) > 1 or len(set(devices)) < len(devices):
        names = ", ".join(map(str, devices))
        raise MisuseError(f"{OPTION} needs a GPU for each rank, all on one machine, and these are {names}")
    return [device.index for device in devices]
