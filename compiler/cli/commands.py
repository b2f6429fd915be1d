"""The commands plan, compile and build. This module imports none of the compiler's libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from splitc.compiler.cli.request_options import request_reader
from splitc.compiler.pipelines.names import files_of_folder, find_models, name_models
from splitc.compiler.request.request import Request
from splitc.runtime.cli import completion
from splitc.runtime.cli.bars import shown_bars
from splitc.runtime.cli.completion import one_of
from splitc.runtime.cli.options import is_given, with_options
from splitc.runtime.cli.shared_options import FILL, JSON, PACKAGE, REPORT, check_outputs, model_there, there
from splitc.runtime.cli.tables import describe_built, describe_collectives
from splitc.runtime.cli.terminal import out, print_json, print_to_the_end, print_warning
from splitc.runtime.engines.kinds import choose_engine
from splitc.runtime.errors import MisuseError
from splitc.runtime.feeds.fills import parse_fills
from splitc.runtime.hardware.devices import parse_devices, parse_hosts
from splitc.runtime.package.manifest import BuildOptions, Manifest
from splitc.runtime.package.pipeline_file import read_pipeline
from splitc.runtime.reports.page_writer import check_report, write_page
from splitc.runtime.units import format_bytes, parse_bytes, plural

if TYPE_CHECKING:
    from splitc.compiler.packaging.building import BuildSettings
    from splitc.compiler.planning.plan import Plan

# Options for engines that are built.
TENSORRT: dict[str, Any] = {"rich_help_panel": "TensorRT"}


def _modules(given: Mapping[str, Any], incomplete: str) -> list[str]:
    """The names of a folder's models, for completion."""
    folder = Path(given["model"])
    return [name for name, _ in name_models(folder, find_models(list(files_of_folder(folder))))]


MODEL = typer.Argument(
    help="The ONNX model, or a folder of several.",
    metavar="MODEL",
    autocompletion=completion.models,
    callback=model_there,
    is_eager=True,
)


def _source_there(context: typer.Context, model: Path) -> Path | None:
    """The path. With --export it may also be an id on a Hub, which is not checked."""
    return model if context.params.get("export") else model_there(model)


SOURCE = typer.Argument(
    help="The ONNX model, or a folder of several.",
    metavar="MODEL",
    autocompletion=completion.models,
    callback=_source_there,
    is_eager=True,
)
EXPORT = typer.Option(
    False,
    "--export",
    help="Let optimum export MODEL first: transformers' or diffusers' folder, or its id on a Hub.",
    is_eager=True,  # it is read before MODEL
)
MODULES = typer.Option(
    [],
    "--module",
    help="Of a folder: take this model only, repeatable. Default: all; of a model in two forms, one.",
    autocompletion=completion.read_by(_modules),
)
SWAP = typer.Option(
    False, "--swap", help="Of a folder: models take turns, and only the one at work has its weights in memory."
)
DEVICE = typer.Option(
    [],
    "--device",
    "-d",
    help='A device, repeatable. Several at once: "cpu0&cpu1", 3xcpu. Of a host: host1/2xcuda. Of one model of a '
    'folder: "unet=cuda0&cuda1,vae=cuda0". Default: all GPUs.',
    autocompletion=completion.devices,
)
HOSTS = typer.Option(
    None, "--hosts", metavar="2x4xcuda", help="Instead of -d: hosts that are alike, here two with four GPUs each."
)
TIMING_CACHE = typer.Option(
    None, "--timing-cache", help="TensorRT's timing cache, read and written. Default: beside the package.", **TENSORRT
)

JOBS = typer.Option(
    None, "--jobs", "-j", min=1, help="Files written and engines built at once. Default: as many as there are cores."
)

# The libraries that these commands need. A machine that only runs packages needs none of them.
LIBRARIES = ("onnx", "onnx_ir", "onnx_shape_inference", "sympy")


def _need_libraries() -> None:
    """Raise MisuseError if libraries are missing. The message names all of them."""
    if missing := [name.replace("_", "-") for name in LIBRARIES if find_spec(name) is None]:
        raise MisuseError(
            f"this command needs {', '.join(missing)}, not installed here: pip install {' '.join(missing)}. Only "
            "plan, compile and build need them"
        )


def _with_libraries(request: Request) -> Request:
    _need_libraries()
    return request


def _devices(device: list[str] = DEVICE, hosts: str | None = HOSTS) -> list[str]:
    """The names of the devices to plan for; none if none are given, for all GPUs of this machine."""
    return device if hosts is None else [str(device) for device in parse_hosts(hosts)]


_request = request_reader(_with_libraries)


def _build_settings(
    build_when: str = typer.Option(
        "now",
        "--build",
        help="now; or later: only write ONNX files, for 'splitc build' elsewhere.",
        autocompletion=one_of(("now", "later")),
        **TENSORRT,
    ),
    keep_onnx: bool = typer.Option(
        False, "--keep-onnx", help="Leave the ONNX files in the package, to build it again.", **TENSORRT
    ),
    timing_cache: Path | None = TIMING_CACHE,
    optimization_level: int | None = typer.Option(
        None, "--builder-optimization-level", min=0, max=5, help="0 builds fast, 5 builds fast engines.", **TENSORRT
    ),
    workspace: str | None = typer.Option(
        None, "--workspace", help="Maximum scratch memory of an engine, as in 4GiB.", **TENSORRT
    ),
    version_compatible: bool = typer.Option(
        False, "--version-compatible", help="Build engines that later versions of TensorRT also run.", **TENSORRT
    ),
    hardware_compatible: bool = typer.Option(
        False, "--hardware-compatible", help="Build engines that all GPUs from Ampere on can run.", **TENSORRT
    ),
    weight_streaming: bool = typer.Option(
        False, "--weight-streaming", help="Build engines that can keep weights in host memory.", **TENSORRT
    ),
    strip_weights: bool = typer.Option(
        False, "--strip-weights", help="Build engines that read their weights from the ONNX files.", **TENSORRT
    ),
    tactic_sources: str | None = typer.Option(
        None, "--tactic-sources", help="Libraries to take kernels from: cublas,cudnn, or none.", **TENSORRT
    ),
) -> BuildSettings:
    """How to build TensorRT engines."""
    from splitc.compiler.packaging.building import BuildSettings

    if build_when not in ("now", "later"):
        raise MisuseError(f"unknown --build '{build_when}': there are now and later")
    options = BuildOptions(
        optimization_level=optimization_level,
        workspace=None if workspace is None else parse_bytes(workspace),
        version_compatible=version_compatible,
        hardware_compatible=hardware_compatible,
        weight_streaming=weight_streaming,
        strip_weights=strip_weights,
        tactic_sources=_parse_sources(tactic_sources),
    )
    return BuildSettings(options, build_when == "later", keep_onnx, timing_cache)


@with_options("request", _request)
@with_options("devices", _devices)
def plan(
    request: Request,
    devices: list[str],
    model: Path = MODEL,
    module: list[str] = MODULES,
    swap: bool = SWAP,
    output: Path | None = typer.Option(None, "--output", "-o", help="Write the plan here, to edit or compile it."),
    explain: bool = typer.Option(
        False,
        "--explain",
        help="Show each attention and norm, fused or why not; in tensor mode also each axis, split or why not.",
    ),
    report: Path | None = REPORT,
    as_json: bool = JSON,
) -> None:
    """Show what each device would hold, against its budget. Nothing is built."""
    from splitc.compiler.api import plan_model
    from splitc.compiler.packaging.refusals import with_refusals
    from splitc.compiler.planning.plan_file import to_file, write_plan
    from splitc.compiler.show.plan_tables import check_explained, print_explained, print_plan

    check_outputs({"--output": output, "--report": report}, [model])
    check_report(report)
    if model.is_dir():
        from splitc.compiler.cli.folders import plan_folder

        plan_folder(model, devices, request, module, swap, output, explain, report, as_json)
        return
    _need_folder(model, module, swap)
    with shown_bars():
        decided = plan_model(model, devices, request)
    if explain:
        check_explained(decided)
    decided = with_refusals(decided)
    if output:
        write_plan(decided, output)
    if report:
        from splitc.compiler.show.plan_page import plan_page

        write_page(report, plan_page(decided))
    if as_json:
        print_json(to_file(decided))
        return
    print_plan(decided)
    if explain:
        print_explained(decided)
    if output:
        out.print(f"wrote {output}: splitc compile {model} --plan {output} -o PACKAGE")


@with_options("request", _request)
@with_options("devices", _devices)
@with_options("build", _build_settings)
def compile_command(
    context: typer.Context,
    request: Request,
    devices: list[str],
    build: BuildSettings,
    model: Path = SOURCE,
    export: bool = EXPORT,
    module: list[str] = MODULES,
    swap: bool = SWAP,
    package: Path = typer.Option(..., "--output", "-o", help="The package's folder, which must not exist yet."),
    plan_path: Path | None = typer.Option(
        None,
        "--plan",
        help="A plan from 'splitc plan -o'. Options below must agree.",
        callback=there("plan"),
    ),
    weights: str = typer.Option(
        "copy",
        "--weights",
        help="copy: into the package. link: hard links to the model's data, where that fits.",
        autocompletion=one_of(("copy", "link")),
    ),
    verify: bool = typer.Option(
        True, "--verify/--no-verify", help="Compare with the unsplit model, if the package computes otherwise than it."
    ),
    jobs: int | None = JOBS,
    fill: list[str] = FILL,
    force: bool = typer.Option(False, "--force", help="Replace a package that is there."),
    as_json: bool = JSON,
) -> None:
    """Split a model, or a folder of models, over devices and write the package that runs it."""
    # Imported here, as in plan, since a machine that only runs packages has no onnx.
    from splitc.compiler.packaging.package import compile_model
    from splitc.compiler.packaging.staging import check_target, check_weights
    from splitc.compiler.pipelines.exporting import exported
    from splitc.compiler.planning.plan_file import to_file
    from splitc.compiler.show.plan_tables import print_plan

    def say(text: str) -> None:
        if not as_json:
            print_to_the_end(lambda: out.print(text, soft_wrap=True))

    given = partial(is_given, context)
    how: dict[str, Any] = {"weights": weights, "force": force, "verify": verify, "jobs": jobs, "build": build}
    how |= {"threads": request.threads, "fills": parse_fills(fill), "warn": print_warning, "say": say}
    check_weights(weights)
    check_target(package, force)
    if export or model.is_dir():
        from splitc.compiler.cli.folders import compile_folder

        with exported(str(model), package) if export else nullcontext(model) as folder:
            compile_folder(folder, package, devices, request, module, swap, plan_path, given, as_json, how)
        return
    _need_folder(model, module, swap)
    decided = _decide(model, plan_path, devices, request, build, given)
    if not as_json:
        print_to_the_end(lambda: print_plan(decided))
    with shown_bars():
        manifest = compile_model(decided, package, **how)
    print_to_the_end(lambda: print_json(to_file(decided)) if as_json else _print_written(package, manifest))


def _decide(
    model: Path,
    plan_path: Path | None,
    devices: list[str],
    request: Request,
    build: BuildSettings,
    given: Callable[[str], bool],
) -> Plan:
    """The plan in the file; without a file, a new plan."""
    from splitc.compiler.api import plan_model
    from splitc.compiler.modes.replanning import plan_from_file
    from splitc.compiler.packaging.building import check_settings
    from splitc.compiler.planning.plan_file import read_plan
    from splitc.compiler.planning.settled import check_settled

    if plan_path:
        check_settled(plan_path, read_plan(plan_path), request, devices, given)
        return plan_from_file(model, plan_path, request.trust_external_data)
    check_settings(choose_engine(request.engine, parse_devices(devices)), build)  # before the model is read
    with shown_bars():
        return plan_model(model, devices, request)


def _need_folder(model: Path, modules: list[str], swap: bool) -> None:
    """Raise MisuseError for an option of folders with a single model."""
    if swap:
        raise MisuseError(f"--swap is for the models of a folder, and {model} is one model: leave it out")
    if modules:
        raise MisuseError(f"--module names a model of a folder, and {model} is one model: leave it out")


def _print_written(package: Path, manifest: Manifest) -> None:
    size = format_bytes(sum(file.bytes for file in manifest.files if file.hash is not None))
    linked = ", beside links to the model's data" if any(file.hash is None for file in manifest.files) else ""
    if (said := describe_collectives(manifest)) is not None:
        out.print(said)
    out.print(f"wrote {package}: {plural(len(manifest.devices), 'rank')}, {size}{linked}")
    if manifest.build is not None and manifest.build.built is None:
        out.print(f"its engines are not built yet: run 'splitc build {package}' where it will run")


def build_command(
    package: Path = PACKAGE, timing_cache: Path | None = TIMING_CACHE, jobs: int | None = JOBS, as_json: bool = JSON
) -> None:
    """Build the TensorRT engines of a package here, from the ONNX files that it holds."""
    _need_libraries()
    from splitc.compiler.packaging.building import build_package
    from splitc.compiler.pipelines.writer import build_pipeline

    pipeline = read_pipeline(package)
    with shown_bars():
        if pipeline is None:
            manifests = {"": build_package(package, timing_cache, jobs)}
        else:
            manifests = build_pipeline(package, pipeline, timing_cache, jobs)
    if as_json:
        builds = {name: manifest.build for name, manifest in manifests.items()}
        print_json({"modules": builds} if pipeline else builds[""])
        return
    for name, manifest in manifests.items():
        assert manifest.build is not None and manifest.build.built is not None
        engines = sum(len(rank.engines) for rank in manifest.ranks)
        built = f"{engines} engines with {manifest.engine} {describe_built(manifest.build.built)}"
        out.print(f"{name}: built {built}" if name else f"built {built}")


def _parse_sources(text: str | None) -> list[str] | None:
    return None if text is None else [name for name in text.lower().split(",") if name and name != "none"]
