"""Plans of one model or of a folder, for the commands plan and compile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import Struct

from splitc.compiler.api import plan_model
from splitc.compiler.modes.replanning import plan_from_file
from splitc.compiler.packaging.building import BuildSettings, check_settings
from splitc.compiler.packaging.package import compile_model
from splitc.compiler.packaging.refusals import with_refusals
from splitc.compiler.pipelines.placement import plan_pipeline
from splitc.compiler.pipelines.plan import PipelinePlan
from splitc.compiler.pipelines.plan_file import plan_from_pipeline_file, to_pipeline_file, write_pipeline_plan
from splitc.compiler.pipelines.writer import compile_pipeline
from splitc.compiler.planning.plan_file import read_plan, to_file, write_plan
from splitc.compiler.planning.settled import check_settled, need_nothing_given
from splitc.compiler.request.request import Request
from splitc.compiler.show.pipeline_page import pipeline_page
from splitc.compiler.show.pipeline_tables import print_pipeline
from splitc.compiler.show.plan_page import plan_page
from splitc.compiler.show.plan_tables import check_explained, print_plan
from splitc.runtime.cli.bars import shown_bars
from splitc.runtime.cli.tables import describe_collectives
from splitc.runtime.cli.terminal import out
from splitc.runtime.engines.kinds import choose_engine
from splitc.runtime.errors import MisuseError
from splitc.runtime.hardware.devices import parse_devices
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.reports.contents import Page
from splitc.runtime.units import format_bytes, plural


@dataclass(frozen=True)
class Asked:
    """What to plan: a model, or the `modules` of a folder (all if there are none), which work in turn with `swap`."""

    model: Path
    devices: Sequence[str]
    request: Request
    modules: Sequence[str]
    swap: bool


@dataclass(frozen=True)
class PlanKind:
    """What the commands do with the plans of one kind.

    - `show` prints a plan, `page` makes its page, `content` is that of its plan.json, and `save` writes this file.
    - `warned` adds warnings for operators that can't be built.
    - `compile` is `compile_model` or `compile_pipeline`, and `show_written` prints its result.
    """

    show: Callable[[Any], None]
    page: Callable[[Any], Page]
    content: Callable[[Any], Struct]
    save: Callable[[Any, Path], None]
    warned: Callable[[Any], Any]
    compile: Callable[..., Any]
    show_written: Callable[[Path, Any], None]


def decide(asked: Asked, explain: bool = False) -> tuple[PlanKind, Any]:
    """The plan of a model or of a folder, and its kind. Raises MisuseError if it can't `explain` such a plan."""
    model, devices, request = asked.model, asked.devices, asked.request
    if model.is_dir():
        if explain:
            raise MisuseError(f"--explain is for one model, and {model} is a folder: name the ONNX file in it")
        with shown_bars():
            return FOLDER, plan_pipeline(model, devices, request, asked.modules, asked.swap)
    _need_no_modules(asked)
    with shown_bars():
        plan = plan_model(model, devices, request)
    if explain:
        check_explained(plan)
    return MODEL, plan


def decide_to_compile(
    asked: Asked, path: Path | None, given: Callable[[str], bool], build: BuildSettings
) -> tuple[PlanKind, Any]:
    """The plan in the file at `path`, or without one a new plan, and its kind.

    Raises MisuseError for an option that was `given` and contradicts the file, and as `check_settings` does.
    """
    if path is not None:
        return _read(asked, path, given)
    if not asked.model.is_dir():  # before the model is read
        check_settings(choose_engine(asked.request.engine, parse_devices(asked.devices)), build)
    return decide(asked)


def _read(asked: Asked, path: Path, given: Callable[[str], bool]) -> tuple[PlanKind, Any]:
    model, devices, request = asked.model, asked.devices, asked.request
    if model.is_dir():
        flags = {"-d": bool(devices), "--module": bool(asked.modules), "--swap": asked.swap}
        need_nothing_given(path, request, given, [flag for flag, there in flags.items() if there])
        return FOLDER, plan_from_pipeline_file(model, path, request.trust_external_data)
    _need_no_modules(asked)
    check_settled(path, read_plan(path), request, devices, given)
    return MODEL, plan_from_file(model, path, request.trust_external_data)


def _need_no_modules(asked: Asked) -> None:
    """Raise MisuseError for an option of folders with a single model."""
    if asked.swap:
        raise MisuseError(f"--swap is for the models of a folder, and {asked.model} is one model: leave it out")
    if asked.modules:
        raise MisuseError(f"--module names a model of a folder, and {asked.model} is one model: leave it out")


def _modules_warned(plan: PipelinePlan) -> PipelinePlan:
    return replace(plan, modules=tuple(replace(module, plan=with_refusals(module.plan)) for module in plan.modules))


def _show_written(package: Path, manifest: Manifest) -> None:
    linked = ", beside links to the model's data" if any(file.hash is None for file in manifest.files) else ""
    if (said := describe_collectives(manifest)) is not None:
        out.print(said)
    out.print(f"wrote {package}: {plural(len(manifest.devices), 'rank')}, {_size([manifest])}{linked}")
    if manifest.build is not None and manifest.build.built is None:
        out.print(f"its engines are not built yet: run 'splitc build {package}' where it will run")


def _show_modules(package: Path, manifests: Mapping[str, Manifest]) -> None:
    modules = plural(len(manifests), "module")
    out.print(f"wrote {package}: {modules} ({', '.join(manifests)}), {_size(manifests.values())}")


def _size(manifests: Iterable[Manifest]) -> str:
    """The bytes of the files that were written, without links."""
    return format_bytes(sum(file.bytes for manifest in manifests for file in manifest.files if file.hash is not None))


MODEL = PlanKind(print_plan, plan_page, to_file, write_plan, with_refusals, compile_model, _show_written)
FOLDER = PlanKind(
    print_pipeline,
    pipeline_page,
    to_pipeline_file,
    write_pipeline_plan,
    _modules_warned,
    compile_pipeline,
    _show_modules,
)
