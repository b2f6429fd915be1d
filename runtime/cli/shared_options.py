"""Options that several commands have, and checks of the files that they name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import typer

from splitc.runtime.cli import completion
from splitc.runtime.cli.completion import one_of
from splitc.runtime.errors import FeedError, MisuseError, PackageError, SplitcError
from splitc.runtime.files.written import check_not_read, check_output, is_replaced
from splitc.runtime.package import manifest_file, pipeline_file
from splitc.runtime.package.verification import WORDS
from splitc.runtime.requests.rank_kinds import KINDS


def package_there(path: Path | None) -> Path | None:
    """The path. Raises MisuseError if it is no package, before other options are read, which may be wrong for that."""
    if path is not None and all(
        _is_nothing(path / name) for name in (manifest_file.FILE_NAME, pipeline_file.FILE_NAME)
    ):
        error = MisuseError(manifest_file.why_no_package(path))
        error.page = PackageError.page
        raise error
    return path


def there(what: str, error: type[SplitcError] = MisuseError) -> Callable[[Path | None], Path | None]:
    """A callback for an option that names a file to read. It raises `error` if none exists, as in `no such plan: x`.

    Click processes options in the order given, and then missing ones.
    """

    def look(path: Path | None) -> Path | None:
        if path is not None and _is_nothing(path):
            raise error(f"no such {what}: {path}")
        return path

    return look


def _is_nothing(path: Path) -> bool:
    """Whether nothing has this path. A path that can't be examined counts as existing."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return True
    except OSError:
        return False
    return False


model_there = there("model file")

# Looked at first, as all else is about it.
PACKAGE = typer.Argument(
    help="The package's folder.",
    metavar="PACKAGE",
    autocompletion=completion.packages,
    callback=package_there,
    is_eager=True,
)
MODULE = typer.Option(
    None, "--module", help="The model to use, of a package that has several.", autocompletion=completion.modules
)
JSON = typer.Option(False, "--json", help="Print the result as JSON on standard output.")
REPORT = typer.Option(
    None, "--report", metavar="PAGE.html", help="Also write a report here: a page with charts, for a browser."
)
THREADS = typer.Option(
    None, "--threads", min=1, help="Threads of each CPU device. Default: the package's, else the cores divided."
)
VERIFY = typer.Option(
    "once",
    "--verify",
    metavar="|".join(WORDS),
    help="How often to compare the files' hashes with the manifest. Once: again when a file has changed.",
    autocompletion=one_of(WORDS),
)
INPUTS = typer.Option(
    None,
    "--inputs",
    help="Arrays by input name: .npz, a folder of .npy, or polygraphy's JSON. Default: made up.",
    callback=there("file", FeedError),
)
DEVICE = typer.Option(
    [],
    "--device",
    "-d",
    help="Run on these devices instead of the package's: one for each rank, repeatable.",
    autocompletion=completion.devices,
)
ADAPTER = typer.Option(
    [],
    "--adapter",
    metavar="FILE[:SCALE]",
    help="An adapter (LoRA) for all requests, repeatable: their sum. The package was compiled with --lora-slots.",
)
CUDA_GRAPH = typer.Option(
    True, "--cuda-graph/--no-cuda-graph", help="Replay previously seen shapes as CUDA graphs, on GPUs."
)
HOST_CODE = typer.Option(
    False, "--host-code", help="Allow TensorRT engines to run code that they contain (--version-compatible)."
)
RANKS = typer.Option(
    None,
    "--ranks",
    metavar="|".join(KINDS),
    help="Ranks are threads, processes or mpi. Default: mpi under mpirun, processes on several GPUs, else threads.",
    autocompletion=one_of(KINDS),
)
MEASURE = typer.Option(
    True, "--memory/--no-memory", help="Measure each rank's memory, in a separate process, beside the prediction."
)
SEED = typer.Option(0, "--seed", min=0, help="Seed of made-up inputs.")
TRUST_DATA = typer.Option(False, "--trust-external-data", help="Also read weights that lie outside the model's folder.")
SHAPES = typer.Option(
    [],
    "--shapes",
    metavar="SHAPES",
    help="An input's shape to make up, repeatable: ids:1x16 or ids:[1,16]. Default: the planned ones.",
)
FILL = typer.Option(
    [],
    "--fill",
    metavar="NAME=HOW",
    help="How to make up an input, repeatable: ones, zeros, normal, arange, randint:0:32000. Default: by its role.",
    autocompletion=completion.fills,
)


def check_outputs(outputs: Mapping[str, Path | None], reads: Iterable[Path | None]) -> None:
    """Raise MisuseError for an output that can't be written, that is read, or that has the path of another one.

    `outputs` are paths by the names of their options. A model's external data count as read.
    """
    written = {name: path for name, path in outputs.items() if path is not None}
    sources = [path for path in reads if path is not None]
    for path in written.values():
        check_output(path, sources)
    if any(path.exists() for path in written.values()):  # or else none is overwritten: models are slow to parse
        from splitc.runtime.engines.onnx_session import data_files  # loads ONNX Runtime

        data = [file for source in sources if source.suffix == ".onnx" for file in data_files(source)]
        for path in written.values():
            check_not_read(path, data)
    places: dict[str, str] = {}
    for name, path in written.items():
        other = places.setdefault(os.path.realpath(path), name)
        if other != name and is_replaced(path):
            raise MisuseError(f"{other} and {name} are both {path}: choose another name for one of them")
