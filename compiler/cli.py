"""The commands that need the model: plan, compile. `main` is the whole program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Callable, NoReturn, Optional

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar

from splitc.runtime.cli import JSON, RANK_SIZES, app, block_range, print_cuts
from splitc.runtime.devices import parse_devices
from splitc.runtime.errors import MisuseError
from splitc.runtime.terminal import err, out, print_json, run_app, table
from splitc.runtime.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from splitc.compiler.plan import Plan

MODEL = typer.Argument(help="The ONNX model.", metavar="MODEL")
DEVICE = typer.Option(
    ..., "--device", "-d", help='A device, repeatable: -d cpu0 -d cpu1. Several at once: "cpu0&cpu1", 3xcpu.'
)
SPLIT_MODE = typer.Option("layer", "--split-mode", help="layer: consecutive blocks to each device.")
TENSOR_SPLIT = typer.Option(
    None, "--tensor-split", help="Each device's share, as in 3,1. Default: in proportion to the budgets."
)
MEMORY = typer.Option(
    [],
    "--memory",
    help="A device's budget, repeatable: cpu0=4GiB, or 4GiB for all. Default: free memory less headroom.",
)
HEADROOM = typer.Option("1GiB", "--headroom", help="Memory to leave free.")
SHAPES = typer.Option([], "--shapes", help="An input's shape to plan for, repeatable: ids:1x16 or ids:[1,16].")


def main() -> NoReturn:
    """The command `splitc`."""
    run_app(app)


@app.command()
def plan(
    model: Path = MODEL,
    device: list[str] = DEVICE,
    split_mode: str = SPLIT_MODE,
    tensor_split: Optional[str] = TENSOR_SPLIT,
    memory: list[str] = MEMORY,
    headroom: str = HEADROOM,
    shapes: list[str] = SHAPES,
    as_json: bool = JSON,
) -> None:
    """Show which device would hold what, against its budget. Nothing is built."""
    decided = _plan(model, device, split_mode, tensor_split, memory, headroom, shapes)
    if as_json:
        print_json(_describe(decided))
    else:
        _print_plan(decided)


@app.command("compile")
def compile_command(
    model: Path = MODEL,
    package: Path = typer.Option(..., "--output", "-o", help="The package's folder, which must not exist yet."),
    device: list[str] = DEVICE,
    split_mode: str = SPLIT_MODE,
    tensor_split: Optional[str] = TENSOR_SPLIT,
    memory: list[str] = MEMORY,
    headroom: str = HEADROOM,
    shapes: list[str] = SHAPES,
    threads: Optional[int] = typer.Option(
        None, "--threads", min=1, help="Threads of each CPU device, for the package."
    ),
    force: bool = typer.Option(False, "--force", help="Replace a package that is there."),
    as_json: bool = JSON,
) -> None:
    """Split a model over devices and write the package that runs it."""
    # Imported here, as in _plan: a machine that only runs packages has no onnx.
    from splitc.compiler.package import check_target, compile_model

    check_target(package, force)
    decided = _plan(model, device, split_mode, tensor_split, memory, headroom, shapes)
    if not as_json:
        _print_plan(decided)
    with _progress(sum(rank.memory.weights for rank in decided.ranks)) as progress:
        manifest = compile_model(decided, package, threads=threads, force=force, progress=progress)
    if as_json:
        print_json(_describe(decided))
    else:
        size = sum(file.bytes for file in manifest.files)
        out.print(f"wrote [bold]{package}[/]: {len(manifest.ranks)} ranks, {format_bytes(size)}")


def _plan(
    model: Path,
    device: list[str],
    split_mode: str,
    tensor_split: Optional[str],
    memory: list[str],
    headroom: str,
    shapes: list[str],
) -> Plan:
    from splitc.compiler.plan import plan_model
    from splitc.compiler.shapes import parse_shapes

    return plan_model(
        model,
        parse_devices(device),
        split_mode=split_mode,
        shapes=parse_shapes(shapes),
        tensor_split=_parse_shares(tensor_split),
        memory=memory,
        headroom=parse_bytes(headroom),
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
    rows = table("rank", "blocks", *RANK_SIZES, "budget", " ", right=(*RANK_SIZES, " "))
    for number, rank in enumerate(plan.ranks):
        memory = rank.memory
        rows.add_row(
            f"{number} {rank.device}",
            block_range([block.name for block in rank.stage.blocks]),
            *map(format_bytes, (memory.weights, memory.activations, memory.cache)),
            ProgressBar(total=max(1, rank.budget), completed=memory.total, width=10),
            f"{memory.total / max(1, rank.budget):.0%} of {format_bytes(rank.budget)}",
        )
    out.print(rows)
    print_cuts([([value.name or "" for value in cut.values], cut.bytes) for cut in plan.cuts])


def _describe(plan: Plan) -> dict[str, object]:
    """The plan as `--json` prints it."""
    return {
        "split_mode": plan.split_mode,
        "shapes": plan.analysis.shapes,
        "blocks": len(plan.analysis.partition.blocks),
        "ranks": [
            {
                "device": str(rank.device),
                "budget_bytes": rank.budget,
                "blocks": [block.name for block in rank.stage.blocks],
                "weights_bytes": rank.memory.weights,
                "activation_bytes": rank.memory.activations,
                "cache_bytes": rank.memory.cache,
            }
            for rank in plan.ranks
        ],
        "cut_bytes": [cut.bytes for cut in plan.cuts],
        "cuts": [{"values": [value.name for value in cut.values], "bytes": cut.bytes} for cut in plan.cuts],
    }
