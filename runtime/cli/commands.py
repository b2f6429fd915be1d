"""The commands that need a package or nothing: devices, run, check, bench, inspect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import typer

from splitc.runtime import arrays
from splitc.runtime.cli.options import with_options
from splitc.runtime.cli.tables import (
    differences_table,
    print_bench,
    print_devices,
    print_links,
    print_manifest,
    print_memory,
)
from splitc.runtime.cli.terminal import err, out, print_json, print_warning, table
from splitc.runtime.devices import list_devices, parse_devices
from splitc.runtime.errors import EngineError, MisuseError, OutputsDifferError
from splitc.runtime.fills import make_inputs, parse_fills
from splitc.runtime.generate.sampling import Sampling
from splitc.runtime.generate.text import Text, read_prompt
from splitc.runtime.generate.tokens import PROMPT_CHUNK, Timings
from splitc.runtime.machine import known_machine
from splitc.runtime.manifest import Manifest, read_manifest
from splitc.runtime.memory_use import RankMemory
from splitc.runtime.session import Session
from splitc.runtime.settings import parse_settings
from splitc.runtime.tools.bench import bench
from splitc.runtime.tools.compare import compare
from splitc.runtime.tools.link_times import measure_machine
from splitc.runtime.tools.rank_memory import measure_memory
from splitc.runtime.tools.routes import find_routes
from splitc.runtime.tools.trace import write_trace
from splitc.runtime.tools.unsplit import bound_inputs, open_reference
from splitc.runtime.units import format_seconds, format_shape
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
CUDA_GRAPH = typer.Option(True, "--cuda-graph/--no-cuda-graph", help="Replay what came before as CUDA graphs, on GPUs.")
MEASURE = typer.Option(
    True, "--memory/--no-memory", help="Measure each rank's memory, in a process of its own, beside the prediction."
)
SEED = typer.Option(0, "--seed", help="Seed of made-up inputs.")
FILL = typer.Option(
    [],
    "--fill",
    metavar="NAME=HOW",
    help="Make up an input so, repeatable: ones, zeros, normal, arange, randint:0:32000. Default: by what it is for.",
)


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
    print_devices(found)
    if machine.measured:
        print_links(machine)


Load = Callable[..., Session]


def _loading(
    device: list[str] = DEVICE,
    cuda_graph: bool = CUDA_GRAPH,
    threads: int | None = THREADS,
    verify: bool = VERIFY,
) -> Load:
    """How a command loads a package."""
    return partial(Session, devices=device, cuda_graphs=cuda_graph, threads=threads, verify=verify)


@app.command()
@with_options("load", _loading)
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
    feeds = arrays.load_arrays(inputs)
    with load(package) as session:
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
@with_options("load", _loading)
def check(
    load: Load,
    package: Path = PACKAGE,
    model: Path = typer.Option(..., "--model", "-m", help="The unsplit ONNX model."),
    inputs: Path | None = INPUTS,
    reference: str | None = typer.Option(
        None,
        "--reference",
        help="Where the unsplit model runs: cpu0, cuda0. Default: a GPU of the package's where it fits, else the CPU.",
    ),
    settings: list[str] = typer.Option(
        [], "--set", metavar="NAME=VALUE", help="Another value for an input that was bound when it was compiled."
    ),
    rtol: float | None = typer.Option(None, "--rtol", help="Tolerance relative to each output's largest value."),
    atol: float | None = typer.Option(None, "--atol", help="Absolute tolerance, added to that."),
    seed: int = SEED,
    fill: list[str] = FILL,
    memory: bool = MEASURE,
    as_json: bool = JSON,
) -> None:
    """Compare a package with the unsplit model on the same inputs. Exit code 4 when an output differs."""
    if not model.is_file():
        raise MisuseError(f"no such model file: {model}")
    with load(package) as session:
        with _feeds(session, inputs, seed, fill) as feeds:
            actual = session.run(feeds)
        bound = bound_inputs(session.manifest, parse_settings(settings))
        threads = session.threads * len(session.manifest.ranks)
        opened = open_reference(model, session.manifest, session.devices, threads, asked=reference, settings=bound)
        with opened as whole:
            expected = whole.run(feeds)
        found = compare(expected, actual, number_type=session.manifest.number_type, rtol=rtol, atol=atol)
        measured = _measure(session, feeds) if memory else []
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
        out.print(f"[green]{len(found)} of {len(found)} outputs agree[/] with {model.name}")


def _measure(session: Session, feeds: dict[str, arrays.Array]) -> list[RankMemory]:
    """The memory of each rank: of GPUs what they hold now, after runs; of CPU devices in a process of its own each."""
    for source, target in session.by_host:
        print_warning(f"copies from {source} to {target} come out wrong on this machine: they go through the host")
    for note in session.notes:
        print_warning(note)
    return session.device_memory() or measure_memory(session.package, session.threads, feeds)


@contextmanager
def _feeds(session: Session, inputs: Path | None, seed: int, fills: list[str]) -> Iterator[dict[str, arrays.Array]]:
    """Arrays for the session from a file, or made up; with those, an engine's failure says what may be wrong."""
    if inputs:
        if fills:
            raise MisuseError("--fill makes up inputs, and --inputs gives them: leave one of them away")
        yield arrays.load_arrays(inputs)
        return
    try:
        yield make_inputs(session.inputs, seed, parse_fills(fills))
    except EngineError as error:
        raise EngineError(
            f"{error}\nThe inputs were made up in the sizes that the package was planned for; these may not fit "
            "together. Give --inputs, --fill, or compile with --shapes for every input."
        ) from error


@app.command("bench")
@with_options("load", _loading)
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
        help="Threads of the unsplit model, repeatable. Default: all ranks', and one's.",
    ),
    inputs: Path | None = INPUTS,
    in_flight: int = typer.Option(1, "--in-flight", min=1, help="Requests under way at the same time."),
    trace: Path | None = typer.Option(None, "--trace", help="Write a timeline here, for Perfetto or Chrome."),
    runs: int = typer.Option(50, "--runs", min=1, help="Timed runs."),
    warmup: int = typer.Option(5, "--warmup", min=0, help="Runs before that."),
    seed: int = SEED,
    fill: list[str] = FILL,
    memory: bool = MEASURE,
    as_json: bool = JSON,
) -> None:
    """Time a package: latency and rate, and how long each rank was busy and waiting."""
    if baseline and not baseline.is_file():
        raise MisuseError(f"no such model file: {baseline}")
    with load(package, in_flight=in_flight) as session, _feeds(session, inputs, seed, fill) as feeds:
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
    print_bench(result, session.manifest.split_mode)
    if measured:
        print_memory(measured)


@app.command("generate")
@with_options("load", _loading)
def generate_command(
    load: Load,
    package: Path = PACKAGE,
    prompt: str | None = typer.Option(None, "--prompt", "-p", help="The text to go on from."),
    prompt_ids: str | None = typer.Option(None, "--prompt-ids", help="The same as token ids: 1,2,3."),
    tokenizer: Path | None = typer.Option(
        None, "--tokenizer", help="tokenizer.json, or a folder that has it. Without, token ids are printed."
    ),
    max_new_tokens: int = typer.Option(100, "--max-new-tokens", "-n", min=1, help="Tokens to generate."),
    temperature: float = typer.Option(0.0, "--temperature", help="0 takes the likeliest token; above, by chance."),
    top_k: int = typer.Option(0, "--top-k", help="Choose among the likeliest so many. 0: all."),
    top_p: float = typer.Option(1.0, "--top-p", help="Choose among the fewest that have this probability together."),
    seed: int = typer.Option(0, "--seed", help="Seed of the choice."),
    stop: list[int] = typer.Option([], "--stop", help="A token id to stop at, repeatable. Default: the tokenizer's."),
    prefill: Path | None = typer.Option(
        None, "--prefill", help="A package for the prompt: the model without caches, where it is a model of its own."
    ),
    prompt_chunk: int = typer.Option(PROMPT_CHUNK, "--prompt-chunk", min=1, help="Tokens of the prompt at a time."),
    as_json: bool = JSON,
) -> None:
    """Generate text, or tokens, with a package of a language model."""
    text = Text.load(tokenizer) if tokenizer else None
    ids = read_prompt(text, prompt, prompt_ids)
    sampling = Sampling(temperature, top_k, top_p, seed)
    timings = Timings()
    tokens: list[int] = []
    with ExitStack() as stack:
        session = stack.enter_context(load(package))
        first = stack.enter_context(load(prefill, devices=None)) if prefill else None
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
    routes = find_routes(manifest, list_devices)
    if as_json:
        print_json({**describe(manifest), "routes": routes})
    else:
        print_manifest(manifest, routes)


def describe(manifest: Manifest) -> dict[str, object]:
    """The facts of a package itself that `inspect --json` prints."""
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
