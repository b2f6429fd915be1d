"""The commands that run a package: run, bench."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import typer

from splitc.runtime.arrays import files as array_files
from splitc.runtime.cli import completion
from splitc.runtime.cli.bars import shown_bars
from splitc.runtime.cli.options import with_options
from splitc.runtime.cli.run_options import Load, as_run, loading, measure_ranks, open_feeds
from splitc.runtime.cli.run_tables import print_bench, print_memory, print_memory_terms
from splitc.runtime.cli.shared_options import (
    FILL,
    INPUTS,
    JSON,
    MEASURE,
    PACKAGE,
    REPORT,
    SEED,
    SHAPES,
    TRUST_DATA,
    check_outputs,
    model_there,
    there,
)
from splitc.runtime.cli.terminal import print_json, print_table
from splitc.runtime.errors import FeedError
from splitc.runtime.reports.page_writer import check_report, write_page
from splitc.runtime.tools.bench import bench
from splitc.runtime.tools.earlier_bench import read_bench
from splitc.runtime.tools.trace import write_trace
from splitc.runtime.units import format_shape

BASELINE = typer.Option(
    None,
    "--baseline",
    help="The unsplit model, timed in turns with the package.",
    autocompletion=completion.models,
    callback=model_there,
)
BEFORE = typer.Option(None, "--before", help="An earlier bench's --json, to compare with.", callback=there("file"))


@with_options("load", loading)
def run(
    load: Load,
    package: Path = PACKAGE,
    inputs: Path = typer.Option(
        ...,
        "--inputs",
        help="Arrays by input name: .npz, a folder of .npy, polygraphy's JSON.",
        callback=there("file", FeedError),
    ),
    outputs: Path = typer.Option(..., "--outputs", help="Where the outputs go: .npz, or .json for polygraphy's JSON."),
    as_json: bool = JSON,
) -> None:
    """Run a package once, from a file of inputs to a file of outputs."""
    check_outputs({"--outputs": outputs}, [package, inputs])
    array_files.check_ending(outputs)
    feeds = array_files.load_arrays(inputs)
    with shown_bars(), load(package) as session:
        results = session.run(feeds)
    array_files.save_arrays(outputs, results)
    if as_json:
        print_json({name: {"dtype": str(array.dtype), "shape": array.shape} for name, array in results.items()})
        return
    rows = [(name, str(array.dtype), format_shape(array.shape)) for name, array in results.items()]
    print_table(("output", "type", "shape"), rows)


@with_options("load", loading)
def bench_command(
    load: Load,
    package: Path = PACKAGE,
    baseline: Path | None = BASELINE,
    baseline_threads: list[int] = typer.Option(
        [],
        "--baseline-threads",
        min=1,
        help="Threads of the unsplit model, repeatable. Default: those of all ranks, and those of one.",
    ),
    trusts_data: bool = TRUST_DATA,
    inputs: Path | None = INPUTS,
    in_flight: int = typer.Option(1, "--in-flight", min=1, metavar="N", help="Requests in flight at the same time."),
    report: Path | None = REPORT,
    before: Path | None = BEFORE,
    trace: Path | None = typer.Option(None, "--trace", help="Write a timeline here, for Perfetto or Chrome."),
    runs: int = typer.Option(50, "--runs", min=1, help="Timed runs."),
    warmup: int = typer.Option(5, "--warmup", min=0, help="Runs before the timed ones."),
    seed: int = SEED,
    fill: list[str] = FILL,
    shapes: list[str] = SHAPES,
    memory: bool = MEASURE,
    as_json: bool = JSON,
) -> None:
    """Time a package: latency and rate, and how long each rank was busy and waiting."""
    check_outputs({"--report": report, "--trace": trace}, [package, baseline, inputs, before])
    check_report(report)
    earlier = None if before is None else read_bench(before)
    opened = partial(load, package, in_flight=in_flight)
    with shown_bars(), opened() as session, open_feeds(session, inputs, seed, fill, shapes) as feeds:
        result = bench(
            session,
            feeds,
            in_flight=in_flight,
            baseline=baseline,
            baseline_threads=baseline_threads,
            runs=runs,
            warmup=warmup,
            trusts_data=trusts_data,
        )
        manifest = as_run(session.manifest, session.devices)
        measured = measure_ranks(opened, session, feeds) if memory else []
    if trace:
        write_trace(trace, manifest.ranks, result.timeline)
    if report:
        from splitc.runtime.reports.package_pages import bench_page

        write_page(report, bench_page(package.name, manifest, result, measured, earlier))
    if as_json:
        print_json({"time": replace(result, timeline=[], alone={}), "memory": measured})
        return
    print_bench(result, manifest, earlier)
    if measured:
        print_memory(measured)
        print_memory_terms()
