"""The command inspect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from splitc.runtime.cli import completion
from splitc.runtime.cli.shared_options import JSON, MODULE, PACKAGE, REPORT, check_outputs
from splitc.runtime.cli.tables import print_manifest, print_modules
from splitc.runtime.cli.terminal import out, print_json, print_table
from splitc.runtime.errors import MisuseError
from splitc.runtime.hardware.devices import list_devices
from splitc.runtime.package.files import files_of
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.package.manifest_file import FILE_NAME, read_manifest
from splitc.runtime.package.pipeline_file import PipelineFile, find_module, read_pipeline
from splitc.runtime.package.unfolded import count_groups, unfolded
from splitc.runtime.reports.page_writer import check_report, write_page
from splitc.runtime.tools.routes import find_routes
from splitc.runtime.units import format_bytes


def inspect(
    package: Path = PACKAGE,
    module: str | None = MODULE,
    rank: int | None = typer.Option(
        None, "--rank", help="List only the files that this rank's host needs.", autocompletion=completion.ranks
    ),
    report: Path | None = REPORT,
    as_json: bool = JSON,
) -> None:
    """Show what a package holds: ranks, blocks, memory, what crosses the cuts."""
    check_outputs({"--report": report}, [package])
    check_report(report)
    pipeline = read_pipeline(package) if module is None else None
    if pipeline is not None and rank is not None and len(pipeline.modules) > 1:
        raise MisuseError(f"--rank needs --module: {package} has several models")
    if pipeline is not None and rank is None:
        _inspect_modules(package, pipeline, report, as_json)
        return
    name = package.name
    package = find_module(package, module)
    manifest = unfolded(read_manifest(package))
    if rank is not None:
        needed = describe_rank(package, manifest, rank)
        if as_json:
            print_json(needed)
        else:
            print_rank_files(needed)
        return
    if report:
        _write_report(report, name, {module or "": manifest})
    routes = find_routes(manifest, list_devices)
    if as_json:
        print_json({**describe(manifest), "routes": routes})
    else:
        print_manifest(manifest, routes)


def _write_report(
    report: Path, name: str, manifests: Mapping[str, Manifest], files: Sequence[str] = (), swap: bool = False
) -> None:
    from splitc.runtime.reports.package_pages import inspect_page

    write_page(report, inspect_page(name, manifests, files, swap))


def _inspect_modules(package: Path, pipeline: PipelineFile, report: Path | None, as_json: bool) -> None:
    manifests = {module.name: unfolded(read_manifest(find_module(package, module.name))) for module in pipeline.modules}
    if report:
        _write_report(report, package.name, manifests, [file.path for file in pipeline.files], pipeline.swap)
    if as_json:
        modules = {name: describe(manifest) for name, manifest in manifests.items()}
        print_json({"modules": modules, "files": pipeline.files, "swap": pipeline.swap})
    else:
        print_modules(manifests, pipeline)


@dataclass(frozen=True)
class RankFiles:
    """The files that a rank needs, with their bytes: the manifest and its own files."""

    rank: int
    device: str
    bytes: int
    files: dict[str, int]


def describe_rank(package: Path, manifest: Manifest, rank: int) -> RankFiles:
    """The output of `inspect --rank`. Raises MisuseError if there is no such rank."""
    if not 0 <= rank < len(manifest.ranks):
        raise MisuseError(f"--rank is {rank}, and {package} has the ranks 0 to {len(manifest.ranks) - 1}")
    own = {file.path: file.bytes for file in files_of(manifest, rank)}
    files = {FILE_NAME: (package / FILE_NAME).stat().st_size, **own}
    return RankFiles(rank, manifest.ranks[rank].device, sum(files.values()), files)


def print_rank_files(needed: RankFiles) -> None:
    """Print the files that a rank needs."""
    out.print(f"rank {needed.rank} ({needed.device}) needs {format_bytes(needed.bytes)}:")
    print_table(("file", "size"), [(path, format_bytes(size)) for path, size in needed.files.items()], right=["size"])


# What `inspect --json` says of a rank, by the manifest's names.
RANK_FIELDS = (
    *("device", "blocks", "weights_bytes", "activation_bytes", "cache_bytes", "engine_bytes", "mapped_bytes"),
    *("adapter_bytes", "limit_bytes", "total_bytes", "engines"),
)


def describe(manifest: Manifest) -> dict[str, object]:
    """The output of `inspect --json` about the package itself."""
    return {
        "split_mode": manifest.split_mode,
        "batch_groups": count_groups(manifest, len(manifest.ranks)),
        "engine": manifest.engine,
        "build": manifest.build,
        "source": manifest.source,
        "number_type": manifest.number_type,
        "blocks": len(manifest.blocks),
        "inputs": manifest.inputs,
        "outputs": manifest.outputs,
        "states": manifest.states,
        "ranks": [{name: getattr(rank, name) for name in RANK_FIELDS} for rank in manifest.ranks],
        "cut_bytes": [cut.bytes for cut in manifest.cuts],
        "cuts": manifest.cuts,
        "collectives": manifest.collectives,
        "unsplit": manifest.unsplit,
    }
