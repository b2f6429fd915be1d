"""The commands plan, compile and build. This module imports none of the compiler's libraries."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
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
from splitc.runtime.cli.tables import describe_built
from splitc.runtime.cli.terminal import out, print_json, print_to_the_end, print_warning
from splitc.runtime.errors import MisuseError
from splitc.runtime.feeds.fills import parse_fills
from splitc.runtime.hardware.devices import parse_hosts
from splitc.runtime.package.manifest import BuildOptions
from splitc.runtime.package.pipeline_file import read_pipeline
from splitc.runtime.reports.page_writer import check_report, write_page
from splitc.runtime.units import parse_bytes

if TYPE_CHECKING:
    from splitc.compiler.packaging.building import BuildSettings

# Options for engines that are built.
TENSORRT: dict[str, Any] = {"rich_help_panel": "TensorRT"}


def _modules(given: Mapping[str, Any], incomplete: str) -> list[str]:
    """The names of a folder's models, for completion."""
    folder = Path(given["model"])
    return [name for name, _ in name_models(folder, find_models(list(files_of_folder(folder))))]


def _model_there(context: typer.Context, model: Path) -> Path | None:
    """The path. With --export it may also be an id on a Hub, which is not checked."""
    return model if context.params.get("export") else model_there(model)


MODEL = typer.Argument(
    help="The ONNX model, or a folder of several.",
    metavar="MODEL",
    autocompletion=completion.models,
    callback=_model_there,
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


def _devices(device: list[str] = DEVICE, hosts: str | None = HOSTS) -> list[str]:
    """The names of the devices to plan for; none if none are given, for all GPUs of this machine."""
    return device if hosts is None else [str(device) for device in parse_hosts(hosts)]


_request = request_reader()


def _build_settings(
    build_when: str = typer.Option(
        "now",
        "--build",
        help="now, or later: only ONNX files, for 'splitc build' elsewhere.",
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
    _need_libraries()
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
    _need_libraries()
    # Imported here, as in compile, since a machine that only runs packages has no onnx.
    from splitc.compiler.cli.decided import Asked, decide
    from splitc.compiler.show.plan_tables import print_explained

    check_outputs({"--output": output, "--report": report}, [model])
    check_report(report)
    kind, decided = decide(Asked(model, devices, request, module, swap), explain)
    decided = kind.warned(decided)
    if output:
        kind.save(decided, output)
    if report:
        write_page(report, kind.page(decided))
    if as_json:
        print_json(kind.content(decided))
        return
    kind.show(decided)
    if explain:
        print_explained(decided)
    if output:
        again = f"splitc compile {quote(str(model))} --plan {quote(str(output))} -o PACKAGE"
        out.print(f"wrote {output}: {again}", soft_wrap=True)


@with_options("request", _request)
@with_options("devices", _devices)
@with_options("build", _build_settings)
def compile_command(
    context: typer.Context,
    request: Request,
    devices: list[str],
    build: BuildSettings,
    model: Path = MODEL,
    export: bool = EXPORT,
    module: list[str] = MODULES,
    swap: bool = SWAP,
    package: Path = typer.Option(..., "--output", "-o", help="The package's folder, which must not exist yet."),
    plan_path: Path | None = typer.Option(
        None,
        "--plan",
        help="A plan from 'splitc plan -o'. Other options must agree with it.",
        callback=there("plan"),
    ),
    weights: str = typer.Option(
        "copy",
        "--weights",
        help="copy: into the package. link: hard links to the model's data, where possible.",
        autocompletion=one_of(("copy", "link")),
    ),
    verify: bool = typer.Option(
        True, "--verify/--no-verify", help="Compare with the unsplit model, if the package computes differently."
    ),
    jobs: int | None = JOBS,
    fill: list[str] = FILL,
    force: bool = typer.Option(False, "--force", help="Replace a package that is there."),
    as_json: bool = JSON,
) -> None:
    """Split a model, or a folder of models, over devices and write the package that runs it."""
    from splitc.compiler.cli.decided import Asked, decide_to_compile
    from splitc.compiler.packaging.staging import check_target, check_weights
    from splitc.compiler.pipelines.exporting import exported

    def say(text: str) -> None:
        if not as_json:
            print_to_the_end(lambda: out.print(text, soft_wrap=True))

    how: dict[str, Any] = {"weights": weights, "force": force, "verify": verify, "jobs": jobs, "build": build}
    how |= {"threads": request.threads, "fills": parse_fills(fill), "warn": print_warning, "say": say}
    check_weights(weights)
    check_target(package, force)
    with exported(str(model), package) if export else nullcontext(model) as source:
        kind, decided = decide_to_compile(
            Asked(source, devices, request, module, swap), plan_path, partial(is_given, context), build
        )
        if not as_json:
            print_to_the_end(lambda: kind.show(decided))
        with shown_bars():
            written = kind.compile(decided, package, **how)
        print_to_the_end(lambda: print_json(kind.content(decided)) if as_json else kind.show_written(package, written))


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
