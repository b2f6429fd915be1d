"""The commands that need the model: plan, compile. `main` is the whole program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Callable, NoReturn, Optional

import typer
from rich.bar import Bar
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from splitc.runtime.cli import JSON, RANK_SIZES, app, block_range, print_cuts
from splitc.runtime.errors import MisuseError
from splitc.runtime.terminal import err, out, print_json, print_warning, run_app, table
from splitc.runtime.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from splitc.compiler.plan import Plan, Request

MODEL = typer.Argument(help="The ONNX model.", metavar="MODEL")
DEVICE = typer.Option(
    [], "--device", "-d", help='A device, repeatable: -d cpu0 -d cpu1. Several at once: "cpu0&cpu1", 3xcpu.'
)
SPLIT_MODE = typer.Option("layer", "--split-mode", help="layer: consecutive blocks to each device.")
OBJECTIVE = typer.Option(
    "throughput", "--objective", help="throughput: the slowest stage as fast as can be. latency: the sum of all stages."
)
SPREAD = typer.Option(False, "--spread", help="Use every device, even where fewer would do.")
TENSOR_SPLIT = typer.Option(
    None,
    "--tensor-split",
    help="Each device's share of the weights, as in 3,1. Default: what makes the objective best.",
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


@app.command()
def plan(
    model: Path = MODEL,
    output: Optional[Path] = typer.Option(None, "--output", "-o", help="Write the plan here, to edit and compile it."),
    device: list[str] = DEVICE,
    split_mode: str = SPLIT_MODE,
    objective: str = OBJECTIVE,
    spread: bool = SPREAD,
    tensor_split: Optional[str] = TENSOR_SPLIT,
    memory: list[str] = MEMORY,
    headroom: str = HEADROOM,
    shapes: list[str] = SHAPES,
    profile: bool = PROFILE,
    threads: Optional[int] = THREADS,
    as_json: bool = JSON,
) -> None:
    """Show which device would hold what, against its budget. Nothing is built."""
    from splitc.compiler.plan import plan_model
    from splitc.compiler.plan_file import to_file, write_plan

    request = _request(split_mode, objective, spread, tensor_split, memory, headroom, shapes, profile, threads)
    decided = plan_model(model, device, request)
    if output:
        write_plan(decided, output)
    if as_json:
        print_json(to_file(decided))
        return
    _print_plan(decided)
    if output:
        out.print(f"wrote [bold]{output}[/]: splitc compile {model} --plan {output} -o PACKAGE")


@app.command("compile")
def compile_command(
    model: Path = MODEL,
    package: Path = typer.Option(..., "--output", "-o", help="The package's folder, which must not exist yet."),
    plan_path: Optional[Path] = typer.Option(
        None, "--plan", help="A plan from 'splitc plan -o', which then decides instead of the options below."
    ),
    device: list[str] = DEVICE,
    split_mode: str = SPLIT_MODE,
    objective: str = OBJECTIVE,
    spread: bool = SPREAD,
    tensor_split: Optional[str] = TENSOR_SPLIT,
    memory: list[str] = MEMORY,
    headroom: str = HEADROOM,
    shapes: list[str] = SHAPES,
    profile: bool = PROFILE,
    threads: Optional[int] = THREADS,
    weights: str = typer.Option(
        "copy", "--weights", help="copy: into the package. link: hard links to the model's data files, nothing copied."
    ),
    force: bool = typer.Option(False, "--force", help="Replace a package that is there."),
    as_json: bool = JSON,
) -> None:
    """Split a model over devices and write the package that runs it."""
    # Imported here, as in plan: a machine that only runs packages has no onnx.
    from splitc.compiler.package import check_target, compile_model
    from splitc.compiler.plan import plan_model
    from splitc.compiler.plan_file import plan_from_file, to_file

    check_target(package, force)
    if plan_path:
        if device or tensor_split or memory or shapes:
            raise MisuseError("--plan has the devices, shares, budgets and shapes: edit it, or leave it out")
        decided = plan_from_file(model, plan_path)
    else:
        request = _request(split_mode, objective, spread, tensor_split, memory, headroom, shapes, profile, threads)
        decided = plan_model(model, device, request)
    if not as_json:
        _print_plan(decided)
    with _progress(sum(rank.memory.weights for rank in decided.ranks)) as progress:
        manifest = compile_model(
            decided, package, weights=weights, threads=threads, force=force, progress=progress, warn=print_warning
        )
    if as_json:
        print_json(to_file(decided))
    else:
        size = format_bytes(sum(file.bytes for file in manifest.files if file.sha256 is not None))
        linked = ", beside links to the model's data" if any(file.sha256 is None for file in manifest.files) else ""
        out.print(f"wrote [bold]{package}[/]: {len(manifest.ranks)} ranks, {size}{linked}")


def _request(
    split_mode: str,
    objective: str,
    spread: bool,
    tensor_split: Optional[str],
    memory: list[str],
    headroom: str,
    shapes: list[str],
    profile: bool,
    threads: Optional[int],
) -> Request:
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
    )


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


def _print_plan(plan: Plan) -> None:
    """Who holds what, against the budgets, and what crosses the cuts."""
    from splitc.compiler.costs import NOMINAL

    rows = table("rank", "blocks", *RANK_SIZES, "of budget", "", "time", right=(*RANK_SIZES, "", "time"))
    all_seconds = sum(rank.seconds for rank in plan.ranks) or 1.0
    for number, rank in enumerate(plan.ranks):
        memory, budget = rank.memory, max(1, rank.budget)
        rows.add_row(
            f"{number} {rank.device}",
            block_range([block.name for block in rank.stage.blocks]),
            *map(format_bytes, (memory.weights, memory.activations, memory.cache)),
            Bar(size=budget, begin=0, end=memory.total, width=9),
            f"{memory.total / budget:.0%}",
            f"{rank.seconds / all_seconds:.0%}",
        )
    memories = [rank.memory for rank in plan.ranks]
    totals = (sum(m.weights for m in memories), sum(m.activations for m in memories), sum(m.cache for m in memories))
    rows.add_row("all", "", *map(format_bytes, totals), style="dim")
    out.print(rows)
    budgets = {str(rank.device): format_bytes(rank.budget) for rank in plan.ranks}
    same = len(set(budgets.values())) == 1
    listed = f"{next(iter(budgets.values()))} each" if same else ", ".join(f"{d} {b}" for d, b in budgets.items())
    speed = "as measured" if plan.profiled else f"estimated for {NOMINAL[plan.ranks[0].device.kind].name}"
    out.print(f"budget: {listed}; time: {speed}")
    print_cuts([([value.name or "" for value in cut.values], cut.bytes) for cut in plan.cuts])
    again = [rank.repeated for rank in plan.ranks[1:] if rank.repeated.nodes]
    if again:
        nodes = sum(each.nodes for each in again)
        unsent, weights = (format_bytes(sum(getattr(each, n) for each in again)) for n in ("unsent", "weights"))
        out.print(f"computed again: {nodes} cheap nodes, which spares {unsent} a run and repeats {weights} of weights")
    for warning in plan.warnings:
        print_warning(warning)
