"""`plan.json` of a folder: the plan of each module, as `splitc plan` writes it for a single model."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import msgspec
from msgspec import Struct

from splitc.compiler.modes.replanning import replan
from splitc.compiler.pipelines.common_weights import find_common
from splitc.compiler.pipelines.folder import FolderModule, LeftOut, ModelFolder, read_facts
from splitc.compiler.pipelines.plan import ModulePlan, PipelinePlan, module_named, need_fit
from splitc.compiler.planning.plan_file import PlanFile, read_json, to_file
from splitc.runtime.errors import MisuseError
from splitc.runtime.files.written import indented, written_whole
from splitc.runtime.package.checks import is_inside

SCHEMA = 1


class ModuleEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """A module: the path of its model in the folder, why it is on these devices, and its plan, which may be edited."""

    source: str
    why: str
    plan: PlanFile


class DeviceEntry(Struct, frozen=True):
    """A device. Its budget may be edited. The other fields show what all modules hold on it together.

    - `common_bytes`: weights that several modules have and the device holds once.
    - `swapped_bytes`: weights that modules swap, of which only the largest module's count.
    - `mapped_bytes`: weights that stay in files and take no memory.
    - `adapter_bytes`: the additional memory for requests with adapters.
    """

    budget_bytes: int | None = None
    weights_bytes: int = 0
    cache_bytes: int = 0
    engine_bytes: int = 0
    activation_bytes: int = 0
    total_bytes: int = 0
    common_bytes: int = 0
    swapped_bytes: int = 0
    mapped_bytes: int = 0
    adapter_bytes: int = 0


class PipelinePlanFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a folder's plan.json.

    - `files`: travel with the models, and may be edited.
    - `left_out`: is for reading.
    - `swap`: modules work in turn. It may be edited.
    """

    schema: int
    modules: dict[str, ModuleEntry]
    devices: dict[str, DeviceEntry]
    files: list[str] = []
    left_out: list[LeftOut] = []
    swap: bool = False


def to_pipeline_file(plan: PipelinePlan) -> PipelinePlanFile:
    """The content of plan.json for the plan of a folder."""
    folder = plan.folder
    return PipelinePlanFile(
        schema=SCHEMA,
        modules={m.name: ModuleEntry(folder.source(m.module), m.why, to_file(m.plan)) for m in plan.modules},
        devices={
            d.device: DeviceEntry(
                d.budget,
                d.weights,
                d.cache,
                d.engines,
                d.activations,
                d.total,
                d.common,
                d.swapped,
                d.mapped,
                d.adapters,
            )
            for d in plan.devices
        },
        files=[file.as_posix() for file in folder.files],
        left_out=list(folder.left_out),
        swap=plan.swap,
    )


def write_pipeline_plan(plan: PipelinePlan, path: Path) -> None:
    """Write plan.json atomically. Raises MisuseError when it can't be written."""
    with written_whole(path) as file:
        file.write(indented(to_pipeline_file(plan)))


def plan_from_pipeline_file(folder: Path, path: Path, trusts_data: bool = False) -> PipelinePlan:
    """The plan that a file describes, for the folder that it was made for.

    Raises as `plan_from_file` does, for each module, and DoesNotFitError if the modules need more of a device than its
    budget.
    """
    content = read_json(path)
    if isinstance(content, dict) and "modules" not in content:
        raise MisuseError(f"{path} is the plan of one model, and {folder} is a folder: plan the folder")
    try:
        file = msgspec.convert(content, PipelinePlanFile)
    except msgspec.ValidationError as error:
        raise MisuseError(f"{path} is no plan: {error}") from error
    if file.schema != SCHEMA:
        raise MisuseError(f"{path} has schema version {file.schema}, and this splitc reads {SCHEMA}: plan again")
    if not file.modules:
        raise MisuseError(f"{path} has no modules: leave those in it that the package is for, or plan again")
    paths = (*file.modules, *file.files, *(entry.source for entry in file.modules.values()))
    if (outside := next((place for place in paths if not is_inside(place)), None)) is not None:
        raise MisuseError(f"{path} names '{outside}', which leads out of its folder: paths begin in it")
    modules = [_read_module(folder, path, name, entry, trusts_data) for name, entry in file.modules.items()]
    files = tuple(map(PurePosixPath, file.files))
    read = ModelFolder(folder, tuple(module.module for module in modules), files, tuple(file.left_out))
    budgets = {name: device.budget_bytes for name, device in file.devices.items()}
    common = find_common({module.name: module.plan for module in modules}, file.swap)
    plan = PipelinePlan(read, tuple(modules), budgets, common, file.swap)
    need_fit(plan)
    return plan


def _read_module(folder: Path, path: Path, name: str, entry: ModuleEntry, trusts_data: bool) -> ModulePlan:
    with module_named(name):
        module = FolderModule(name, read_facts(folder / entry.source), entry.plan.settings)
        return ModulePlan(module, replan(module.facts.path, entry.plan, path, trusts_data), entry.why)
