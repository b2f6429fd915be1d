"""The command export."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from splitc.runtime.cli.bars import shown_bars
from splitc.runtime.cli.completion import one_of
from splitc.runtime.cli.options import is_given, with_options
from splitc.runtime.cli.shared_options import DEVICE, JSON, MODULE, PACKAGE, RANKS, THREADS, there
from splitc.runtime.cli.terminal import out, print_json
from splitc.runtime.errors import MisuseError
from splitc.runtime.files.written import check_not_read
from splitc.runtime.package.pipeline_file import read_pipeline
from splitc.runtime.requests.admission import MOST_AT_ONCE
from splitc.runtime.requests.sequence import MOST_CAPACITY
from splitc.runtime.serving.genai_folder import export_genai
from splitc.runtime.serving.mlserver_folder import export_mlserver
from splitc.runtime.serving.openai_folder import export_openai
from splitc.runtime.serving.serving_file import Serving
from splitc.runtime.serving.triton_ensemble import export_ensemble
from splitc.runtime.serving.triton_plans import export_plans
from splitc.runtime.serving.triton_repository import MOST_ROWS, export_triton
from splitc.runtime.units import named_values

_SESSION = {"name", "sequences", "capacity", "idle", "device", "threads", "ranks", "in_flight", "adapter"}
# The servers, and the options that say something to some of them only.
SERVERS = {
    "triton": {*_SESSION, "batch"},
    "mlserver": _SESSION,
    "openai": {"name", "device", "threads", "ranks", "in_flight", "tokenizer", "context_length"},
    "genai": {"tokenizer", "context_length", "stop"},
}
# What Triton runs without splitc, and the options that say something to it.
NATIVE = {"ensemble": {"name", "ensemble"}, "plans": {"name", "plans"}}


@dataclass(frozen=True)
class TextOptions:
    """Options of the command for servers that generate text."""

    tokenizer: Path | None = typer.Option(
        None,
        "--tokenizer",
        help="For openai, genai: the folder of tokenizer.json, which goes with the model.",
        callback=there("tokenizer"),
    )
    context_length: int | None = typer.Option(
        None,
        "--context",
        min=1,
        help="For openai, genai: the most tokens of a sequence. Default: the package's own limit.",
    )
    stop: list[int] = typer.Option(
        [], "--stop", help="For genai: a token id that ends a text, repeatable. Default: the tokenizer's."
    )


def _serving(
    capacity: int | None = typer.Option(
        None,
        "--capacity",
        min=1,
        max=MOST_CAPACITY,
        help="Tokens that caches written in place have room for at the start.",
    ),
    idle: float = typer.Option(
        300.0, "--idle", min=1.0, max=1e9, help="Seconds without a request after which a sequence ends."
    ),
    in_flight: int | None = typer.Option(
        None,
        "--in-flight",
        min=1,
        max=MOST_AT_ONCE,
        help="Requests in flight at the same time. Default: two for each rank.",
    ),
    device: list[str] = DEVICE,
    threads: int | None = THREADS,
    ranks: str | None = RANKS,
    adapter: list[str] = typer.Option(
        [],
        "--adapter",
        metavar="NAME=FILE",
        help="An adapter (LoRA) that requests may ask for by their parameter 'adapter', repeatable.",
    ),
) -> Serving:
    return Serving(
        "package",
        idle_seconds=idle,
        capacity=capacity,
        devices=device,
        threads=threads,
        in_flight=in_flight,
        ranks=ranks,
        adapters=named_values("--adapter", adapter, "NAME=FILE, to give it a name", str.partition),
    )


SERVER = typer.Argument(
    help=f"What it is for: {', '.join(SERVERS)}.",
    metavar="SERVER",
    autocompletion=one_of(SERVERS.keys()),
    is_eager=True,  # it is missed before PACKAGE
)


@with_options("serving", _serving)
@with_options("texts", TextOptions)
def export(
    context: typer.Context,
    serving: Serving,
    texts: TextOptions,
    server: str = SERVER,
    package: Path = PACKAGE,
    output: Path = typer.Option(..., "--output", "-o", help="The folder to write to, which may hold other models."),
    module: str | None = MODULE,
    name: str | None = typer.Option(None, "--name", help="The model's name. Default: the package's folder, or module."),
    sequences: bool | None = typer.Option(
        None,
        "--sequences/--no-sequences",
        help="Keep states on the ranks from request to request, by sequence ids. Default: if the model has caches.",
    ),
    batch: int | None = typer.Option(
        None,
        "--batch",
        min=0,
        max=MOST_CAPACITY,  # of 32 bits, as Triton counts
        help=f"Batch waiting requests up to this many rows; 0: never. Default: {MOST_ROWS}, if rows are independent.",
    ),
    ensemble: bool = typer.Option(
        False,
        "--ensemble",
        help="For Triton: a model of its own ONNX Runtime or TensorRT backend for each stage, without splitc.",
    ),
    plans: bool = typer.Option(
        False,
        "--plans",
        help="For Triton: the plans of all ranks as a model of its own TensorRT backend, without splitc.",
    ),
    as_json: bool = JSON,
) -> None:
    """Write a package in the form that another project's server loads. Its files are hard links."""
    _check_options(context, server)
    pipeline = read_pipeline(package)
    if serving.adapters and module is None and pipeline is not None and len(pipeline.modules) > 1:
        raise MisuseError("--adapter is for one model: name it by --module")
    named: dict[str, Any] = {"module": module, "name": name}
    text: dict[str, Any] = {"tokenizer": texts.tokenizer, "context": texts.context_length}
    with shown_bars():
        if ensemble:
            folders = export_ensemble(package, output, **named)
        elif plans:
            folders = export_plans(package, output, **named)
        elif server == "triton":
            folders = export_triton(package, output, serving, batch=batch, sequences=sequences, **named)
        elif server == "openai":
            folders = export_openai(package, output, serving, **named, **text)
        elif server == "genai":
            folders = export_genai(package, output, module=module, stop=texts.stop, **text)
        else:
            folders = export_mlserver(package, output, serving, sequences=sequences, **named)
    if as_json:
        print_json({"server": server, "folders": [str(folder) for folder in folders]})
        return
    for folder in folders:
        out.print(f"wrote {folder}")


def _check_options(context: typer.Context, server: str) -> None:
    """Raise MisuseError for an unknown server, options that have no effect with it, and an output in the package."""
    if server not in SERVERS:
        raise MisuseError(f"can't export for '{server}': there are {', '.join(SERVERS)}")
    own, what = SERVERS[server], f"'{server}'"
    for option in NATIVE:
        if server == "triton" and is_given(context, option):
            own, what = NATIVE[option], f"--{option}"
    allowed = own | {"context", "server", "package", "output", "module", "as_json"}
    if context.params["sequences"] is False and is_given(context, "idle"):
        raise MisuseError("--idle ends sequences, and with --no-sequences there are none: leave out one of them")
    check_not_read(context.params["output"], [context.params["package"]])
    for parameter in context.command.params:
        if is_given(context, parameter.name) and parameter.name not in allowed:
            raise MisuseError(f"{parameter.opts[0]} has no effect with {what}: leave it out")
