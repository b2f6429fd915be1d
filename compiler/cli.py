"""The commands that need the model: plan, compile, build. Importing them needs no library of the compiler's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from splitc.runtime.cli.commands import app
from splitc.runtime.cli.options import with_options
from splitc.runtime.cli.shared_options import FILL, JSON
from splitc.runtime.cli.tables import describe_built
from splitc.runtime.cli.terminal import err, out, print_json, print_warning
from splitc.runtime.engines.kinds import MODULES
from splitc.runtime.errors import MisuseError
from splitc.runtime.fills import parse_fills
from splitc.runtime.manifest import BuildOptions
from splitc.runtime.settings import parse_settings
from splitc.runtime.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from splitc.compiler.packaging.building import Building, BuildSettings
    from splitc.compiler.planning.plan import Request

# Options that only engines which are built have.
TENSORRT: dict[str, Any] = {"rich_help_panel": "TensorRT"}

MODEL = typer.Argument(help="The ONNX model.", metavar="MODEL")
DEVICE = typer.Option(
    [], "--device", "-d", help='A device, repeatable: -d cpu0 -d cpu1. Several at once: "cpu0&cpu1", 3xcpu.'
)
SPLIT_MODE = typer.Option(
    "auto",
    "--split-mode",
    help="auto: what is predicted to be the best that fits. layer: consecutive blocks to each device. row: slices of "
    "the large matmul weights to each device, and all else to the main one. tensor: a part of every block to each "
    "device, at the same time.",
)
PIPELINE_STAGES = typer.Option(
    1, "--pipeline-stages", min=1, help="In tensor mode: groups of devices, each of which shares a run of blocks."
)
MAIN_DEVICE = typer.Option(
    None, "--main-device", help="In row mode: the device that runs the model. Default: the first."
)
ROW_MIN = typer.Option(
    None, "--row-min", min=1, help="In row mode: the shortest side of a weight that is sliced. Default: 256."
)
FALLBACK = typer.Option(
    None, "--fallback", help="layer: split by layer where the mode asked for can't split the model. Default: fail."
)
OBJECTIVE = typer.Option(
    "throughput", "--objective", help="throughput: the slowest stage as fast as can be. latency: the sum of all stages."
)
SPREAD = typer.Option(False, "--spread", help="Use every device, even where fewer would do.")
TENSOR_SPLIT = typer.Option(
    None,
    "--tensor-split",
    help="Each device's share of the weights, as in 3,1. Default: what makes the objective best; in row and tensor "
    "mode what the budgets are.",
)
MEMORY = typer.Option(
    [],
    "--memory",
    help="A device's budget, repeatable: cpu0=4GiB, or 4GiB for all. Default: free memory less headroom.",
)
HEADROOM = typer.Option("1GiB", "--headroom", help="Memory to leave free.")
ENGINE = typer.Option(
    None,
    "--engine",
    help="onnxruntime, tensorrt or tensorrt-rtx. Default: on GPUs tensorrt where it is installed, else onnxruntime.",
)
SHAPES = typer.Option([], "--shapes", help="An input's shape to plan for, repeatable: ids:1x16 or ids:[1,16].")
RANGE = "repeatable, for engines that are built for a range of sizes (TensorRT)."
MIN_SHAPES = typer.Option([], "--min-shapes", help=f"An input's smallest shape, {RANGE}")
OPT_SHAPES = typer.Option([], "--opt-shapes", help=f"The shape to be fast for, {RANGE}")
MAX_SHAPES = typer.Option([], "--max-shapes", help=f"An input's largest shape, which is planned for, {RANGE}")
SET = typer.Option(
    [],
    "--set",
    metavar="NAME=VALUE",
    help="Bind an input to a constant, repeatable, and fold what follows from it: use_cache_branch=true, sr=16000.",
)
PROFILE = typer.Option(False, "--profile", help="Measure each block's time instead of estimating it.")
TIMING_CACHE = typer.Option(
    None, "--timing-cache", help="TensorRT's timings, read and written. Default: beside the package.", **TENSORRT
)
THREADS = typer.Option(None, "--threads", min=1, help="Threads of each CPU device. Default: the cores divided.")


# What these commands need, and a machine that only runs packages does without.
LIBRARIES = ("onnx", "onnx_ir", "onnx_shape_inference", "sympy")


def _need_libraries() -> None:
    """Raise MisuseError, naming them all, where libraries are missing."""
    if missing := [name.replace("_", "-") for name in LIBRARIES if find_spec(name) is None]:
        raise MisuseError(
            f"this command needs {', '.join(missing)}, not installed here: pip install {' '.join(missing)}. A machine "
            "that only runs packages does without: run, check, bench, generate, inspect and devices"
        )


def _request(
    split_mode: str = SPLIT_MODE,
    objective: str = OBJECTIVE,
    spread: bool = SPREAD,
    pipeline_stages: int = PIPELINE_STAGES,
    main_device: str | None = MAIN_DEVICE,
    row_min: int | None = ROW_MIN,
    fallback: str | None = FALLBACK,
    tensor_split: str | None = TENSOR_SPLIT,
    memory: list[str] = MEMORY,
    headroom: str = HEADROOM,
    engine: str | None = ENGINE,
    shapes: list[str] = SHAPES,
    min_shapes: list[str] = MIN_SHAPES,
    opt_shapes: list[str] = OPT_SHAPES,
    max_shapes: list[str] = MAX_SHAPES,
    settings: list[str] = SET,
    profile: bool = PROFILE,
    threads: int | None = THREADS,
) -> Request:
    """What the options that plan and compile have in common ask for. Raises MisuseError where libraries are missing."""
    _need_libraries()
    from splitc.compiler.frontend.shapes import parse_shapes
    from splitc.compiler.planning.plan import Request
    from splitc.compiler.sharding.row_split import LEAST_SIDE

    return Request(
        split_mode=split_mode,
        objective=objective,
        engine=engine,
        shapes=parse_shapes(shapes),
        min_shapes=parse_shapes(min_shapes),
        opt_shapes=parse_shapes(opt_shapes),
        max_shapes=parse_shapes(max_shapes),
        tensor_split=_parse_shares(tensor_split),
        memory=memory,
        headroom=parse_bytes(headroom),
        spread=spread,
        profile=profile,
        threads=threads,
        pipeline_stages=pipeline_stages,
        main_device=main_device,
        row_min=LEAST_SIDE if row_min is None else row_min,
        fallback=fallback,
        settings=parse_settings(settings),
    )


def _build_settings(
    build_when: str = typer.Option(
        "now", "--build", help="now, or later: write ONNX files, for 'splitc build' on another machine.", **TENSORRT
    ),
    keep_onnx: bool = typer.Option(
        False, "--keep-onnx", help="Leave the ONNX files in the package, to build it again.", **TENSORRT
    ),
    timing_cache: Path | None = TIMING_CACHE,
    optimization_level: int | None = typer.Option(
        None, "--builder-optimization-level", min=0, max=5, help="0 builds fast, 5 builds fast engines.", **TENSORRT
    ),
    workspace: str | None = typer.Option(
        None, "--workspace", help="The most scratch memory of an engine, as in 4GiB.", **TENSORRT
    ),
    version_compatible: bool = typer.Option(
        False, "--version-compatible", help="Engines that later versions of TensorRT run too.", **TENSORRT
    ),
    hardware_compatible: bool = typer.Option(
        False, "--hardware-compatible", help="Engines that GPUs from Ampere on run.", **TENSORRT
    ),
    weight_streaming: bool = typer.Option(
        False, "--weight-streaming", help="Engines that can keep weights in host memory.", **TENSORRT
    ),
    strip_weights: bool = typer.Option(
        False, "--strip-weights", help="Engines without weights, which they take from the ONNX files.", **TENSORRT
    ),
    tactic_sources: str | None = typer.Option(
        None, "--tactic-sources", help="Libraries to take kernels from: cublas,cudnn, or none.", **TENSORRT
    ),
) -> BuildSettings:
    """How TensorRT's engines are to be built."""
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


@app.command()
@with_options("request", _request)
def plan(
    request: Request,
    model: Path = MODEL,
    output: Path | None = typer.Option(None, "--output", "-o", help="Write the plan here, to edit and compile it."),
    device: list[str] = DEVICE,
    explain: bool = typer.Option(
        False, "--explain", help="In tensor mode: the axes found, and why each is split or not."
    ),
    as_json: bool = JSON,
) -> None:
    """Show which device would hold what, against its budget. Nothing is built."""
    from splitc.compiler.modes.choosing import plan_model
    from splitc.compiler.plan_tables import print_axes, print_plan
    from splitc.compiler.planning.plan_file import to_file, write_plan

    decided = plan_model(model, device, request)
    if decided.engine in MODULES:
        from splitc.compiler.packaging.refusals import describe_refusals

        decided = replace(decided, warnings=(*decided.warnings, *describe_refusals(decided)))
    if output:
        write_plan(decided, output)
    if as_json:
        print_json(to_file(decided))
        return
    print_plan(decided)
    if explain:
        print_axes(decided)
    if output:
        out.print(f"wrote [bold]{output}[/]: splitc compile {model} --plan {output} -o PACKAGE")


@app.command("compile")
@with_options("request", _request)
@with_options("build", _build_settings)
def compile_command(
    request: Request,
    build: BuildSettings,
    model: Path = MODEL,
    package: Path = typer.Option(..., "--output", "-o", help="The package's folder, which must not exist yet."),
    plan_path: Path | None = typer.Option(
        None, "--plan", help="A plan from 'splitc plan -o', which then decides instead of the options below."
    ),
    device: list[str] = DEVICE,
    weights: str = typer.Option(
        "copy", "--weights", help="copy: into the package. link: hard links to the model's data files, nothing copied."
    ),
    verify: bool = typer.Option(
        True, "--verify/--no-verify", help="In row and tensor mode: compare with the unsplit model before writing."
    ),
    fill: list[str] = FILL,
    force: bool = typer.Option(False, "--force", help="Replace a package that is there."),
    as_json: bool = JSON,
) -> None:
    """Split a model over devices and write the package that runs it."""
    # Imported here, as in plan: a machine that only runs packages has no onnx.
    from splitc.compiler.modes.choosing import plan_model
    from splitc.compiler.packaging.package import compile_model
    from splitc.compiler.packaging.staging import check_target
    from splitc.compiler.plan_tables import print_plan
    from splitc.compiler.planning.plan_file import plan_from_file, to_file

    check_target(package, force)
    fills = parse_fills(fill)
    if plan_path:
        given = (request.tensor_split, request.memory, request.shapes, request.engine, request.settings)
        if device or any(given):
            raise MisuseError("--plan has the devices, shares, budgets, shapes, settings and engine: edit it instead")
        decided = plan_from_file(model, plan_path)
    else:
        decided = plan_model(model, device, request)
    if not as_json:
        print_plan(decided)
    with _progress(sum(rank.memory.weights for rank in decided.ranks)) as (progress, building):
        manifest = compile_model(
            decided,
            package,
            weights=weights,
            threads=request.threads,
            force=force,
            verify=verify,
            build=build,
            fills=fills,
            progress=progress,
            building=building,
            warn=print_warning,
            say=lambda text: None if as_json else out.print(text, highlight=False, soft_wrap=True),
        )
    if as_json:
        print_json(to_file(decided))
    else:
        size = format_bytes(sum(file.bytes for file in manifest.files if file.sha256 is not None))
        linked = ", beside links to the model's data" if any(file.sha256 is None for file in manifest.files) else ""
        out.print(f"wrote [bold]{package}[/]: {len(manifest.ranks)} ranks, {size}{linked}")
        if manifest.build is not None and manifest.build.built is None:
            out.print(f"its engines are not built yet: run 'splitc build {package}' where it will run")


@app.command("build")
def build_command(
    package: Path = typer.Argument(help="The package's folder.", metavar="PACKAGE"),
    timing_cache: Path | None = TIMING_CACHE,
    as_json: bool = JSON,
) -> None:
    """Build the TensorRT engines of a package here, from the ONNX files that it holds."""
    _need_libraries()
    from splitc.compiler.packaging.building import build_package

    with _progress(0) as (_, building):
        manifest = build_package(package, timing_cache, building)
    if as_json:
        print_json(manifest.build)
        return
    assert manifest.build is not None and manifest.build.built is not None
    engines = sum(len(rank.engines) for rank in manifest.ranks)
    out.print(f"built [bold]{engines}[/] engines with {manifest.engine} {describe_built(manifest.build.built)}")


def _parse_sources(text: str | None) -> list[str] | None:
    return None if text is None else [name for name in text.lower().split(",") if name and name != "none"]


def _parse_shares(text: str | None) -> list[float] | None:
    try:
        return [float(share) for share in text.split(",")] if text else None
    except ValueError:
        raise MisuseError(f"can't read --tensor-split {text}: write one number a device, as in 3,1") from None


@contextmanager
def _progress(total: int) -> Iterator[tuple[Callable[[int], None], Building]]:
    """Bars of the bytes written and of the engines built, on a terminal only; gone when it is done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        writing = bar.add_task("writing weights", total=total, amount="", visible=total > 0)
        engines = bar.add_task("building engines", total=None, amount="", visible=False)
        written = 0

        def wrote(count: int) -> None:
            nonlocal written
            written += count
            bar.update(writing, completed=written, amount=f"{format_bytes(written)} of {format_bytes(total)}")

        def built(done: float, count: int) -> None:
            bar.update(engines, total=count, completed=done, amount=f"{int(done)} of {count}", visible=True)

        yield wrote, built
