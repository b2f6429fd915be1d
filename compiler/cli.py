"""The commands that need the model: plan, compile. `main` is the whole program."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, NoReturn, Optional

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from splitc.compiler.show import print_axes, print_plan
from splitc.compiler.split.row import LEAST_SIDE
from splitc.runtime.cli import JSON, app
from splitc.runtime.errors import MisuseError
from splitc.runtime.terminal import err, out, print_json, print_warning, run_app
from splitc.runtime.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from splitc.compiler.plan import Request

MODEL = typer.Argument(help="The ONNX model.", metavar="MODEL")
DEVICE = typer.Option(
    [], "--device", "-d", help='A device, repeatable: -d cpu0 -d cpu1. Several at once: "cpu0&cpu1", 3xcpu.'
)
SPLIT_MODE = typer.Option(
    "layer",
    "--split-mode",
    help="layer: consecutive blocks to each device. row: slices of the large matmul weights to each device, and all "
    "else to the main one. tensor: a part of every block to each device, at the same time.",
)
PIPELINE_STAGES = typer.Option(
    1, "--pipeline-stages", min=1, help="In tensor mode: groups of devices, each of which shares a run of blocks."
)
MAIN_DEVICE = typer.Option(
    None, "--main-device", help="In row mode: the device that runs the model. Default: the first."
)
ROW_MIN = typer.Option(
    LEAST_SIDE, "--row-min", min=1, help="In row mode: the shortest side of a weight that is sliced."
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
SHAPES = typer.Option([], "--shapes", help="An input's shape to plan for, repeatable: ids:1x16 or ids:[1,16].")
PROFILE = typer.Option(False, "--profile", help="Measure each block's time instead of estimating it.")
THREADS = typer.Option(None, "--threads", min=1, help="Threads of each CPU device. Default: the cores divided.")


def main() -> NoReturn:
    """The command `splitc`."""
    run_app(app)


def _request(
    split_mode: str = SPLIT_MODE,
    objective: str = OBJECTIVE,
    spread: bool = SPREAD,
    pipeline_stages: int = PIPELINE_STAGES,
    main_device: Optional[str] = MAIN_DEVICE,
    row_min: int = ROW_MIN,
    fallback: Optional[str] = FALLBACK,
    tensor_split: Optional[str] = TENSOR_SPLIT,
    memory: list[str] = MEMORY,
    headroom: str = HEADROOM,
    shapes: list[str] = SHAPES,
    profile: bool = PROFILE,
    threads: Optional[int] = THREADS,
) -> Request:
    """What the options that plan and compile have in common ask for."""
    from splitc.compiler.plan import Request
    from splitc.compiler.shapes import parse_shapes

    return Request(
        split_mode=split_mode,
        objective=objective,
        shapes=parse_shapes(shapes),
        tensor_split=_parse_shares(tensor_split),
        memory=memory,
        headroom=parse_bytes(headroom),
        spread=spread,
        profile=profile,
        threads=threads,
        pipeline_stages=pipeline_stages,
        main_device=main_device,
        row_min=row_min,
        fallback=fallback,
    )


def _with_request(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `_request`, and what they make as its argument `request`."""
    options = inspect.signature(_request).parameters
    own = inspect.signature(command).parameters

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        request = _request(**{name: arguments.pop(name) for name in options})
        command(request=request, **arguments)

    parameters = [*(each for name, each in own.items() if name != "request"), *options.values()]
    keywords = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]  # what Typer reads
    known = {**command.__annotations__, **_request.__annotations__}
    run.__annotations__ = {each.name: known[each.name] for each in keywords}
    return run


@app.command()
@_with_request
def plan(
    request: Request,
    model: Path = MODEL,
    output: Optional[Path] = typer.Option(None, "--output", "-o", help="Write the plan here, to edit and compile it."),
    device: list[str] = DEVICE,
    explain: bool = typer.Option(
        False, "--explain", help="In tensor mode: the axes found, and why each is split or not."
    ),
    as_json: bool = JSON,
) -> None:
    """Show which device would hold what, against its budget. Nothing is built."""
    from splitc.compiler.plan_file import to_file, write_plan
    from splitc.compiler.plan_model import plan_model

    decided = plan_model(model, device, request)
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
@_with_request
def compile_command(
    request: Request,
    model: Path = MODEL,
    package: Path = typer.Option(..., "--output", "-o", help="The package's folder, which must not exist yet."),
    plan_path: Optional[Path] = typer.Option(
        None, "--plan", help="A plan from 'splitc plan -o', which then decides instead of the options below."
    ),
    device: list[str] = DEVICE,
    weights: str = typer.Option(
        "copy", "--weights", help="copy: into the package. link: hard links to the model's data files, nothing copied."
    ),
    verify: bool = typer.Option(
        True, "--verify/--no-verify", help="In row and tensor mode: compare with the unsplit model before writing."
    ),
    force: bool = typer.Option(False, "--force", help="Replace a package that is there."),
    as_json: bool = JSON,
) -> None:
    """Split a model over devices and write the package that runs it."""
    # Imported here, as in plan: a machine that only runs packages has no onnx.
    from splitc.compiler.package import check_target, compile_model
    from splitc.compiler.plan_file import plan_from_file, to_file
    from splitc.compiler.plan_model import plan_model

    check_target(package, force)
    if plan_path:
        if device or request.tensor_split or request.memory or request.shapes:
            raise MisuseError("--plan has the devices, shares, budgets and shapes: edit it, or leave it out")
        decided = plan_from_file(model, plan_path)
    else:
        decided = plan_model(model, device, request)
    if not as_json:
        print_plan(decided)
    with _progress(sum(rank.memory.weights for rank in decided.ranks)) as progress:
        manifest = compile_model(
            decided,
            package,
            weights=weights,
            threads=request.threads,
            force=force,
            verify=verify,
            progress=progress,
            warn=print_warning,
        )
    if as_json:
        print_json(to_file(decided))
    else:
        size = format_bytes(sum(file.bytes for file in manifest.files if file.sha256 is not None))
        linked = ", beside links to the model's data" if any(file.sha256 is None for file in manifest.files) else ""
        out.print(f"wrote [bold]{package}[/]: {len(manifest.ranks)} ranks, {size}{linked}")


def _parse_shares(text: Optional[str]) -> Optional[list[float]]:
    try:
        return [float(share) for share in text.split(",")] if text else None
    except ValueError:
        raise MisuseError(f"can't read --tensor-split {text}: write one number a device, as in 3,1") from None


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar of the bytes written, on a terminal only; gone when it is done."""
    columns = (TextColumn("writing weights"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)
