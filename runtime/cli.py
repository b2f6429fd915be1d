"""The commands that need a package or nothing: devices, run, check, bench, inspect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Optional

import typer
from rich.markup import escape
from rich.table import Table

from splitc.runtime import arrays
from splitc.runtime.bench import BenchResult, bench
from splitc.runtime.compare import Difference, compare, load_unsplit
from splitc.runtime.devices import list_devices, parse_devices
from splitc.runtime.errors import EngineError, MisuseError, OutputsDifferError
from splitc.runtime.generate import PROMPT_CHUNK, Timings
from splitc.runtime.gpu import INSTALL, find_cupy
from splitc.runtime.machine import Machine, known_machine, measure_machine
from splitc.runtime.manifest import Build, Manifest, read_manifest
from splitc.runtime.measure import RankMemory, measure_memory
from splitc.runtime.sampling import Sampling
from splitc.runtime.session import Session, format_shape
from splitc.runtime.terminal import err, out, print_json, print_warning, table
from splitc.runtime.text import Text, read_prompt
from splitc.runtime.trace import draw_timeline, write_trace
from splitc.runtime.units import format_bytes, format_seconds
from splitc.runtime.version import VERSION

app = typer.Typer(
    name="splitc",
    help="Split one ONNX model over several devices, offline, and run the pieces as one model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

PACKAGE = typer.Argument(help="The package's folder.", metavar="PACKAGE")
JSON = typer.Option(False, "--json", help="Print the result as JSON on standard output.")
THREADS = typer.Option(
    None, "--threads", min=1, help="Threads of each CPU device. Default: the package's, else the cores divided."
)
VERIFY = typer.Option(True, "--verify/--no-verify", help="Compare the files' hashes with the manifest before loading.")
INPUTS = typer.Option(
    None, "--inputs", help="Arrays by input name: .npz, a folder of .npy, or polygraphy's JSON. Default: made up."
)
DEVICE = typer.Option(
    [], "--device", "-d", help="Run on these devices instead of the package's: one for each rank, repeatable."
)
MEASURE = typer.Option(
    True, "--memory/--no-memory", help="Measure each rank's memory, in a process of its own, beside the prediction."
)
SEED = typer.Option(0, "--seed", help="Seed of made-up inputs.")


def _version(show: bool) -> None:
    if show:
        out.print(f"splitc {VERSION}")
        raise typer.Exit


def _list_devices(show: bool) -> None:
    if show:
        devices(measure=False, as_json=False)
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    listing: bool = typer.Option(
        False, "--list-devices", callback=_list_devices, is_eager=True, help="The same as the command devices."
    ),
) -> None:
    """Options of the program itself."""


@app.command()
def devices(
    measure: bool = typer.Option(
        False, "--measure", help="Measure copies and sums between each pair, and keep that for the planner."
    ),
    as_json: bool = JSON,
) -> None:
    """List the devices of this machine, with their memory."""
    found = list_devices()
    gpus = [device.name for device in found if device.name.startswith("cuda")]
    machine = measure_machine(parse_devices(["cpu0", "cpu1", *gpus])) if measure else known_machine()
    if as_json:
        print_json(machine if measure else found)
        return
    rows = table("device", "what", "capability", "memory", "free", "copies", right=("memory", "free"))
    for device in found:
        sizes = map(format_bytes, (device.total_bytes, device.free_bytes))
        copies = ", ".join(f"{other} {how}" for other, how in device.peers.items())
        rows.add_row(device.name, device.description, device.compute_capability or "", *sizes, copies)
    out.print(rows)
    if not find_cupy():
        out.print(f"No GPUs are looked for. {INSTALL}.")
    if machine.measured:
        _print_links(machine)


def _print_links(machine: Machine) -> None:
    sizes = [format_bytes(each.bytes) for each in next(iter(machine.measured.values()))]
    rows = table("measured", "", *sizes, right=sizes)
    for name, found in machine.measured.items():
        rows.add_row(name, "copy", *(format_seconds(each.copy) for each in found))
        rows.add_row("", "sum", *(format_seconds(each.reduce) for each in found))
    out.print(rows)


@app.command()
def run(
    package: Path = PACKAGE,
    inputs: Path = typer.Option(
        ..., "--inputs", help="Arrays by input name: .npz, a folder of .npy, polygraphy's JSON."
    ),
    outputs: Path = typer.Option(..., "--outputs", help="Where the outputs go: .npz, or .json for polygraphy's JSON."),
    device: list[str] = DEVICE,
    threads: Optional[int] = THREADS,
    verify: bool = VERIFY,
    as_json: bool = JSON,
) -> None:
    """Run a package once, from a file of inputs to a file of outputs."""
    feeds = arrays.load_arrays(inputs)
    with Session(package, devices=device, threads=threads, verify=verify) as session:
        results = session.run(feeds)
    arrays.save_arrays(outputs, results)
    if as_json:
        print_json({name: {"dtype": str(array.dtype), "shape": array.shape} for name, array in results.items()})
        return
    rows = table("output", "type", "shape")
    for name, array in results.items():
        rows.add_row(name, str(array.dtype), format_shape(array.shape))
    out.print(rows)


@app.command()
def check(
    package: Path = PACKAGE,
    model: Path = typer.Option(..., "--model", "-m", help="The unsplit ONNX model."),
    inputs: Optional[Path] = INPUTS,
    rtol: Optional[float] = typer.Option(None, "--rtol", help="Tolerance relative to each output's largest value."),
    atol: Optional[float] = typer.Option(None, "--atol", help="Absolute tolerance, added to that."),
    seed: int = SEED,
    memory: bool = MEASURE,
    device: list[str] = DEVICE,
    threads: Optional[int] = THREADS,
    verify: bool = VERIFY,
    as_json: bool = JSON,
) -> None:
    """Compare a package with the unsplit model on the same inputs. Exit code 4 when an output differs."""
    if not model.is_file():
        raise MisuseError(f"no such model file: {model}")
    with Session(package, devices=device, threads=threads, verify=verify) as session:
        with _feeds(session, inputs, seed) as feeds:
            actual = session.run(feeds)
        expected = load_unsplit(model, session.threads * len(session.manifest.ranks))(feeds)
        found = compare(expected, actual, number_type=session.manifest.number_type, rtol=rtol, atol=atol)
        measured = _measure(session, feeds) if memory else []
    if as_json:
        print_json({"outputs": found, "memory": measured})
    else:
        out.print(_differences_table(found))
        if measured:
            _print_memory(measured)
    if failed := [difference.name for difference in found if not difference.passed]:
        raise OutputsDifferError(f"{len(failed)} of {len(found)} outputs differ beyond tolerance: {', '.join(failed)}")
    if not as_json:
        out.print(f"[green]{len(found)} of {len(found)} outputs agree[/] with {model.name}")


def _measure(session: Session, feeds: dict[str, arrays.Array]) -> list[RankMemory]:
    """The memory of each rank: of GPUs what they hold now, after runs; of CPU devices in a process of its own each."""
    for source, target in session.by_host:
        print_warning(f"copies from {source} to {target} come out wrong on this machine: they go through the host")
    return session.device_memory() or measure_memory(session.package, session.threads, feeds)


@contextmanager
def _feeds(session: Session, inputs: Optional[Path], seed: int) -> Iterator[dict[str, arrays.Array]]:
    """Arrays for the session from a file, or made up; with those, an engine's failure says what may be wrong."""
    if inputs:
        yield arrays.load_arrays(inputs)
        return
    try:
        yield arrays.make_inputs(session.inputs, seed)
    except EngineError as error:
        raise EngineError(
            f"{error}\nThe inputs were made up in the sizes that the package was planned for; these may not fit "
            "together. Give --inputs, or compile with --shapes for every input."
        ) from error


# Outputs that `check` lists one by one, the worst first; a decoder has two for each layer.
LISTED = 12


def _differences_table(found: list[Difference]) -> Table:
    numbers = ("largest error", "relative", "expected", "got")
    rows = table("output", *numbers[:2], "at", *numbers[2:], "", right=numbers)
    worst = sorted(found, key=lambda difference: (difference.passed, -difference.relative))
    listed = [difference for number, difference in enumerate(worst) if number < LISTED or not difference.passed]
    for difference in listed:
        verdict = "[green]agrees[/]" if difference.passed else f"[bold red]differs[/] {difference.problem or ''}"
        errors = (f"{difference.absolute:.2e}", f"{difference.relative:.2e}")
        values = (f"{difference.expected:.6g}", f"{difference.actual:.6g}")
        rows.add_row(difference.name, *errors, ",".join(map(str, difference.where)), *values, verdict)
    if len(found) > len(listed):
        rows.add_row(f"... and {len(found) - len(listed)} more that agree")
    return rows


@app.command("bench")
def bench_command(
    package: Path = PACKAGE,
    baseline: Optional[Path] = typer.Option(
        None, "--baseline", help="The unsplit model, timed in turns with the package."
    ),
    baseline_threads: list[int] = typer.Option(
        [],
        "--baseline-threads",
        min=1,
        help="Threads of the unsplit model, repeatable. Default: all ranks', and one's.",
    ),
    inputs: Optional[Path] = INPUTS,
    in_flight: int = typer.Option(1, "--in-flight", min=1, help="Requests under way at the same time."),
    trace: Optional[Path] = typer.Option(None, "--trace", help="Write a timeline here, for Perfetto or Chrome."),
    runs: int = typer.Option(50, "--runs", min=1, help="Timed runs."),
    warmup: int = typer.Option(5, "--warmup", min=0, help="Runs before that."),
    seed: int = SEED,
    memory: bool = MEASURE,
    device: list[str] = DEVICE,
    threads: Optional[int] = THREADS,
    verify: bool = VERIFY,
    as_json: bool = JSON,
) -> None:
    """Time a package: latency and rate, and how long each rank was busy and waiting."""
    if baseline and not baseline.is_file():
        raise MisuseError(f"no such model file: {baseline}")
    session = Session(package, devices=device, threads=threads, verify=verify, in_flight=in_flight)
    with session, _feeds(session, inputs, seed) as feeds:
        result = bench(
            session,
            feeds,
            in_flight=in_flight,
            baseline=baseline,
            baseline_threads=baseline_threads,
            runs=runs,
            warmup=warmup,
        )
        measured = _measure(session, feeds) if memory else []
    if trace:
        write_trace(trace, session.manifest.ranks, result.timeline)
    if as_json:
        print_json({"time": replace(result, timeline=[]), "memory": measured})
        return
    _print_bench(result, session.manifest.split_mode)
    if measured:
        _print_memory(measured)


def _print_memory(found: Sequence[RankMemory]) -> None:
    """Each rank's memory, measured beside the prediction."""
    sizes = ("weights", "loaded", "predicted", "peak")
    rows = table("rank", *sizes, right=sizes)
    for number, rank in enumerate(found):
        numbers = (rank.predicted_weights, rank.loaded, rank.predicted_total, rank.peak)
        rows.add_row(f"{number} {rank.device}", *map(format_bytes, numbers))
    out.print(rows)
    out.print("weights and predicted are the plan's; loaded and peak were measured, the engine's own memory included.")


# Who works while one request runs.
AT_WORK = {
    "layer": "one rank works while the others wait",
    "row": "the main rank works, and the others multiply with it",
    "tensor": "all ranks work on it at once",
}


def _print_bench(result: BenchResult, split_mode: str) -> None:
    numbers = ("latency", "90 %", "rate", "package / unsplit")
    rows = table("", "threads", *numbers, right=numbers)
    own = result.latency
    threads = f"{len(result.ranks)} x {result.threads}"
    rows.add_row("package", threads, format_seconds(own.median), format_seconds(own.p90), f"{result.rate:.1f}/s")
    for other in result.baselines:
        seconds = map(format_seconds, (other.latency.median, other.latency.p90))
        rows.add_row("unsplit", str(other.threads), *seconds, f"{1 / other.latency.median:.1f}/s", f"{other.ratio:.3f}")
    out.print(rows)
    columns = ("busy", "waiting", "overhead", "at work")
    rows = table("rank", *columns, right=columns)
    for number, rank in enumerate(result.ranks):
        times = map(format_seconds, (rank.busy, rank.waiting, rank.overhead))
        rows.add_row(f"{number} {rank.device}", *times, f"{rank.utilization:.0%}")
    out.print(rows)
    if result.in_flight > 1:
        out.print(
            f"{own.runs} runs, {result.in_flight} in flight: {result.against_one:.2f} times the rate of one at a time; "
            "package / unsplit is time a request."
        )
    else:
        out.print(f"Medians of {own.runs} runs, one request at a time: {AT_WORK[split_mode]}.")
    for number, line in enumerate(draw_timeline(len(result.ranks), result.timeline[-4 * result.in_flight :])):
        out.print(f"rank {number} [cyan]{line}[/]")


@app.command("generate")
def generate_command(
    package: Path = PACKAGE,
    prompt: Optional[str] = typer.Option(None, "--prompt", "-p", help="The text to go on from."),
    prompt_ids: Optional[str] = typer.Option(None, "--prompt-ids", help="The same as token ids: 1,2,3."),
    tokenizer: Optional[Path] = typer.Option(
        None, "--tokenizer", help="tokenizer.json, or a folder that has it. Without, token ids are printed."
    ),
    max_new_tokens: int = typer.Option(100, "--max-new-tokens", "-n", min=1, help="Tokens to generate."),
    temperature: float = typer.Option(0.0, "--temperature", help="0 takes the likeliest token; above, by chance."),
    top_k: int = typer.Option(0, "--top-k", help="Choose among the likeliest so many. 0: all."),
    top_p: float = typer.Option(1.0, "--top-p", help="Choose among the fewest that have this probability together."),
    seed: int = typer.Option(0, "--seed", help="Seed of the choice."),
    stop: list[int] = typer.Option([], "--stop", help="A token id to stop at, repeatable. Default: the tokenizer's."),
    prefill: Optional[Path] = typer.Option(
        None, "--prefill", help="A package for the prompt: the model without caches, where it is a model of its own."
    ),
    prompt_chunk: int = typer.Option(PROMPT_CHUNK, "--prompt-chunk", min=1, help="Tokens of the prompt at a time."),
    device: list[str] = DEVICE,
    threads: Optional[int] = THREADS,
    verify: bool = VERIFY,
    as_json: bool = JSON,
) -> None:
    """Generate text, or tokens, with a package of a language model."""
    text = Text.load(tokenizer) if tokenizer else None
    ids = read_prompt(text, prompt, prompt_ids)
    sampling = Sampling(temperature, top_k, top_p, seed)
    timings = Timings()
    tokens: list[int] = []
    with ExitStack() as stack:
        session = stack.enter_context(Session(package, devices=device, threads=threads, verify=verify))
        first = stack.enter_context(Session(prefill, threads=threads, verify=verify)) if prefill else None
        stream = session.generate(
            ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_tokens=stop or (text.stop_tokens if text else []),
            prompt_chunk=prompt_chunk,
            prefill=first,
            timings=timings,
        )
        for token in stream:
            tokens.append(token)
            if not as_json:
                out.print(text.step(token) if text else f"{token} ", end="", markup=False, soft_wrap=True)
    if as_json:
        print_json({"tokens": tokens, "text": text.decode(tokens) if text else None, "timings": timings})
        return
    out.print()
    err.print(f"[dim]prompt     {_rate(timings.prompt_tokens, timings.prompt_seconds)}[/]")
    err.print(f"[dim]generation {_rate(timings.tokens, timings.seconds)}[/]")


def _rate(tokens: int, seconds: float) -> str:
    rate = f", {tokens / seconds:.1f} tokens/s" if seconds else ""
    return f"{tokens:5} tokens in {format_seconds(seconds)}{rate}"


@app.command()
def inspect(package: Path = PACKAGE, as_json: bool = JSON) -> None:
    """Show what a package holds: ranks, blocks, memory, what crosses the cuts."""
    manifest = read_manifest(package)
    if as_json:
        print_json(describe(manifest))
    else:
        _print_manifest(manifest)


def describe(manifest: Manifest) -> dict[str, object]:
    """The facts of a package that `inspect --json` prints."""
    return {
        "split_mode": manifest.split_mode,
        "engine": manifest.engine,
        "build": manifest.build,
        "source": manifest.source,
        "number_type": manifest.number_type,
        "blocks": len(manifest.blocks),
        "inputs": manifest.inputs,
        "outputs": manifest.outputs,
        "states": manifest.states,
        "ranks": [
            {
                "device": rank.device,
                "blocks": rank.blocks,
                "weights_bytes": rank.weights_bytes,
                "activation_bytes": rank.activation_bytes,
                "cache_bytes": rank.cache_bytes,
                "total_bytes": rank.total_bytes,
                "engines": rank.engines,
            }
            for rank in manifest.ranks
        ],
        "cut_bytes": [cut.bytes for cut in manifest.cuts],
        "cuts": manifest.cuts,
        "collectives": manifest.collectives,
        "unsplit": manifest.unsplit,
    }


def _print_manifest(manifest: Manifest) -> None:
    out.print(
        f"[bold]{manifest.source.name}[/], split by {manifest.split_mode} into {len(manifest.ranks)} ranks "
        f"of {len(manifest.blocks)} blocks, {manifest.engine} engines, {manifest.number_type}"
    )
    if manifest.build is not None:
        out.print(_describe_build(manifest.build))
    rows = table("rank", "blocks", *RANK_SIZES, right=RANK_SIZES)
    for number, rank in enumerate(manifest.ranks):
        sizes = map(format_bytes, (rank.weights_bytes, rank.activation_bytes, rank.cache_bytes))
        rows.add_row(f"{number} {rank.device}", block_range(rank.blocks), *sizes)
    out.print(rows)
    print_cuts([(cut.values, cut.bytes) for cut in manifest.cuts], manifest.split_mode == "row")
    if manifest.collectives:
        out.print(f"{manifest.collectives} {ROUNDS[manifest.split_mode]} a run")
    print_whole([(each.name, each.bytes, each.reason) for each in manifest.unsplit], manifest.split_mode)
    out.print()
    rows = table("", "name", "type", "shape")
    for kind, tensors in (("input", manifest.inputs), ("output", manifest.outputs)):
        for tensor in tensors:
            rows.add_row(kind, tensor.name, tensor.dtype, format_shape(tensor.shape))
    out.print(rows)
    if manifest.states:
        out.print(
            f"{len(manifest.states)} states: " + ", ".join(f"{s.input} -> {s.output}" for s in manifest.states[:4])
        )


def _describe_build(build: Build) -> str:
    if build.built is None:
        return "not built yet: 'splitc build' does that where it will run"
    where = f" on {build.built.gpu} (compute capability {build.built.compute_capability})" if build.built.gpu else ""
    return f"built with version {build.built.version}{where}"


RANK_SIZES = ("weights", "activ.", "cache")
# What brings the ranks of a mode together.
ROUNDS = {"row": "round trips", "tensor": "collectives"}

# Weights left whole that are listed one by one.
WHOLE = 5


def print_whole(weights: Sequence[tuple[str, int, str]], split_mode: str) -> None:
    """The weights that a split mode had to leave whole, the largest with the reason."""
    if not weights:
        return
    total = format_bytes(sum(size for _, size, _ in weights))
    where = "the main device" if split_mode == "row" else "each rank"
    out.print(f"whole on {where}: {total} in {len(weights)} weights, the largest:")
    for name, size, reason in sorted(weights, key=lambda each: -each[1])[:WHOLE]:
        out.print(f"  {escape(name)} {format_bytes(size)}: {escape(reason)}")


def print_cuts(cuts: Sequence[tuple[Sequence[str], int]], from_main: bool) -> None:
    """What crosses each cut: between two ranks that follow each other, or between the main rank and each other one."""
    for number, (names, size) in enumerate(cuts):
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        first = 0 if from_main else number
        out.print(f"cut {first}-{number + 1}: {format_bytes(size)} a run ({listed or 'nothing'})")


def block_range(blocks: list[str]) -> str:
    """Blocks of a rank in few words: `layers.0..layers.5 (6)`."""
    return blocks[0] if len(blocks) == 1 else f"{blocks[0]}..{blocks[-1]} ({len(blocks)})"
