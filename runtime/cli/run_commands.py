"""The commands that run a package: run, check, bench."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer
from rich.text import Text

from splitc.runtime import array_files
from splitc.runtime.cli.options import with_options
from splitc.runtime.cli.run_options import Load, loading, measure_ranks, open_feeds
from splitc.runtime.cli.run_tables import differences_table, print_bench, print_memory
from splitc.runtime.cli.shared_options import FILL, INPUTS, JSON, MEASURE, PACKAGE, SEED, TRUST_DATA
from splitc.runtime.cli.terminal import out, print_json, table
from splitc.runtime.errors import MisuseError, OutputsDifferError
from splitc.runtime.files import check_output
from splitc.runtime.settings import parse_settings
from splitc.runtime.tools.bench import bench
from splitc.runtime.tools.compare import compare
from splitc.runtime.tools.trace import write_trace
from splitc.runtime.tools.unsplit import bound_inputs, open_reference
from splitc.runtime.units import format_shape


@with_options("load", loading)
def run(
    load: Load,
    package: Path = PACKAGE,
    inputs: Path = typer.Option(
        ..., "--inputs", help="Arrays by input name: .npz, a folder of .npy, polygraphy's JSON."
    ),
    outputs: Path = typer.Option(..., "--outputs", help="Where the outputs go: .npz, or .json for polygraphy's JSON."),
    as_json: bool = JSON,
) -> None:
    """Run a package once, from a file of inputs to a file of outputs."""
    check_output(outputs, [package, inputs])
    feeds = array_files.load_arrays(inputs)
    with load(package) as session:
        results = session.run(feeds)
    array_files.save_arrays(outputs, results)
    if as_json:
        print_json({name: {"dtype": str(array.dtype), "shape": array.shape} for name, array in results.items()})
        return
    rows = table("output", "type", "shape")
    for name, array in results.items():
        rows.add_row(name, str(array.dtype), format_shape(array.shape))
    out.print(rows)


@with_options("load", loading)
def check(
    load: Load,
    package: Path = PACKAGE,
    model: Path = typer.Option(..., "--model", "-m", help="The unsplit ONNX model."),
    inputs: Path | None = INPUTS,
    reference: str | None = typer.Option(
        None,
        "--reference",
        help="Where the unsplit model runs: cpu0, cuda0. Default: the package's GPU if it fits there, else the CPU.",
    ),
    settings: list[str] = typer.Option(
        [], "--set", metavar="NAME=VALUE", help="Another value for an input that was bound by 'splitc compile --set'."
    ),
    trusts_data: bool = TRUST_DATA,
    rtol: float | None = typer.Option(None, "--rtol", help="Tolerance relative to each output's largest value."),
    atol: float | None = typer.Option(None, "--atol", help="Absolute tolerance, added to the relative one."),
    seed: int = SEED,
    fill: list[str] = FILL,
    memory: bool = MEASURE,
    as_json: bool = JSON,
) -> None:
    """Compare a package with the unsplit model on the same inputs. Exits with 4 if an output differs."""
    if not model.is_file():
        raise MisuseError(f"no such model file: {model}")
    with load(package) as session:
        with open_feeds(session, inputs, seed, fill) as feeds:
            actual = session.run(feeds)
        bound = bound_inputs(session.manifest, parse_settings(settings))
        threads = session.threads * len(session.manifest.ranks)
        opened = open_reference(
            model,
            session.manifest,
            session.devices,
            threads,
            asked=reference,
            settings=bound,
            trusts_data=trusts_data,
        )
        with opened as whole:
            expected = whole.run(feeds)
        found = compare(expected, actual, number_type=session.manifest.number_type, rtol=rtol, atol=atol)
        measured = measure_ranks(session, feeds) if memory else []
    if as_json:
        print_json({"outputs": found, "reference": str(whole.device), "memory": measured})
    else:
        out.print(f"compared with {whole}")
        out.print(differences_table(found))
        if measured:
            print_memory(measured)
    if failed := [difference.name for difference in found if not difference.passed]:
        raise OutputsDifferError(f"{len(failed)} of {len(found)} outputs differ beyond tolerance: {', '.join(failed)}")
    if not as_json:
        agreement = f"{len(found)} of {len(found)} outputs agree"
        out.print(Text.assemble((agreement, "green"), f" with {model.name}"))


@with_options("load", loading)
def bench_command(
    load: Load,
    package: Path = PACKAGE,
    baseline: Path | None = typer.Option(
        None, "--baseline", help="The unsplit model, timed in turns with the package."
    ),
    baseline_threads: list[int] = typer.Option(
        [],
        "--baseline-threads",
        min=1,
        help="Threads of the unsplit model, repeatable. Default: those of all ranks, and those of one.",
    ),
    trusts_data: bool = TRUST_DATA,
    inputs: Path | None = INPUTS,
    in_flight: int = typer.Option(1, "--in-flight", min=1, help="Requests in flight at the same time."),
    trace: Path | None = typer.Option(None, "--trace", help="Write a timeline here, for Perfetto or Chrome."),
    runs: int = typer.Option(50, "--runs", min=1, help="Timed runs."),
    warmup: int = typer.Option(5, "--warmup", min=0, help="Runs before the timed ones."),
    seed: int = SEED,
    fill: list[str] = FILL,
    memory: bool = MEASURE,
    as_json: bool = JSON,
) -> None:
    """Time a package: latency and rate, and how long each rank was busy and waiting."""
    if baseline and not baseline.is_file():
        raise MisuseError(f"no such model file: {baseline}")
    if trace:
        check_output(trace, [path for path in (package, baseline, inputs) if path])
    with load(package, in_flight=in_flight) as session, open_feeds(session, inputs, seed, fill) as feeds:
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
        measured = measure_ranks(session, feeds) if memory else []
    if trace:
        write_trace(trace, session.manifest.ranks, result.timeline)
    if as_json:
        print_json({"time": replace(result, timeline=[]), "memory": measured})
        return
    print_bench(result, session.manifest.split_mode)
    if measured:
        print_memory(measured)
