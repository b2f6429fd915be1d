"""The commands plan and compile, for a folder of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from splitc.compiler.packaging.refusals import with_refusals
from splitc.compiler.pipelines.placement import plan_pipeline
from splitc.compiler.pipelines.plan_file import plan_from_pipeline_file, to_pipeline_file, write_pipeline_plan
from splitc.compiler.pipelines.writer import compile_pipeline
from splitc.compiler.planning.settled import need_nothing_given
from splitc.compiler.request.request import Request
from splitc.compiler.show.pipeline_page import pipeline_page
from splitc.compiler.show.pipeline_tables import print_pipeline
from splitc.runtime.cli.bars import shown_bars
from splitc.runtime.cli.terminal import out, print_json, print_to_the_end
from splitc.runtime.errors import MisuseError
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.reports.page_writer import write_page
from splitc.runtime.units import format_bytes, plural


def plan_folder(
    folder: Path,
    devices: Sequence[str],
    request: Request,
    wanted: Sequence[str],
    swap: bool,
    output: Path | None,
    explain: bool,
    report: Path | None,
    as_json: bool,
) -> None:
    """Show what each module of a folder would hold on each device. For errors see `plan_pipeline`."""
    if explain:
        raise MisuseError(f"--explain is for one model, and {folder} is a folder: name the ONNX file in it")
    with shown_bars():
        plan = plan_pipeline(folder, devices, request, wanted, swap)
    plan = replace(plan, modules=tuple(replace(module, plan=with_refusals(module.plan)) for module in plan.modules))
    if output:
        write_pipeline_plan(plan, output)
    if report:
        write_page(report, pipeline_page(plan))
    if as_json:
        print_json(to_pipeline_file(plan))
        return
    print_pipeline(plan)
    if output:
        out.print(f"wrote {output}: splitc compile {folder} --plan {output} -o PACKAGE")


def compile_folder(
    folder: Path,
    package: Path,
    devices: Sequence[str],
    request: Request,
    wanted: Sequence[str],
    swap: bool,
    plan_path: Path | None,
    given: Callable[[str], bool],
    as_json: bool,
    options: Mapping[str, Any],
) -> None:
    """Write the package of a folder. `options` are those of `compile_pipeline`, `given` says what the user gave."""
    if plan_path is None:
        with shown_bars():
            plan = plan_pipeline(folder, devices, request, wanted, swap)
    else:
        flags = {"-d": bool(devices), "--module": bool(wanted), "--swap": swap}
        need_nothing_given(plan_path, request, given, [flag for flag, there in flags.items() if there])
        plan = plan_from_pipeline_file(folder, plan_path, request.trust_external_data)
    if not as_json:
        print_to_the_end(lambda: print_pipeline(plan))
    with shown_bars():
        manifests = compile_pipeline(plan, package, **options)
    print_to_the_end(lambda: print_json(to_pipeline_file(plan)) if as_json else _print_written(package, manifests))


def _print_written(package: Path, manifests: Mapping[str, Manifest]) -> None:
    files = [file for manifest in manifests.values() for file in manifest.files if file.hash is not None]
    size = format_bytes(sum(file.bytes for file in files))
    modules = plural(len(manifests), "module")
    out.print(f"wrote {package}: {modules} ({', '.join(manifests)}), {size}")
