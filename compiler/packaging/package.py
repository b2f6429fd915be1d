"""Compile a plan into a package: engines and a manifest. The package appears at its place only when it is complete."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from splitc.compiler.packaging.build_graphs import fit_to_build
from splitc.compiler.packaging.building import BuildSettings, check_settings, find_builder, finish_package
from splitc.compiler.packaging.manifest_entries import make_manifest
from splitc.compiler.packaging.onnx_files import PlacedWeights
from splitc.compiler.packaging.self_check import check_loads, check_outputs, check_sizes_tried
from splitc.compiler.packaging.staging import check_disk_space, check_weights, full_disk_explained, written_aside
from splitc.compiler.packaging.unmasked import write_preamble
from splitc.compiler.packaging.writer import PackageWriter, WeightFile, write_weight_files
from splitc.compiler.packaging.written_rank import WrittenRank, write_rank
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.split import RankProgram
from splitc.runtime.engines.kinds import ONNXRUNTIME, find_kind
from splitc.runtime.errors import MisuseError
from splitc.runtime.feeds.fills import check_fills
from splitc.runtime.hardware.devices import cores, threads_for
from splitc.runtime.package import manifest as m
from splitc.runtime.package.manifest_file import write_manifest
from splitc.runtime.threads.garbage import rare_garbage
from splitc.runtime.threads.progress import doing
from splitc.runtime.units import shortened, whole_number


@rare_garbage()
def compile_model(
    plan: Plan,
    package: str | Path,
    *,
    weights: str = "copy",
    threads: int | None = None,
    force: bool = False,
    verify: bool = True,
    jobs: int | None = None,
    build: BuildSettings = BuildSettings(),
    fills: Mapping[str, m.Fill] = MappingProxyType({}),
    warn: Callable[[str], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> m.Manifest:
    """Write the package of `plan` to the folder `package`, whole or not at all. Returns its manifest.

    - `weights`: `copy`, or `link` for hard links to the model's own data files. A linked package is refused when
      these files were written in place.
    - `threads`: recorded as the number for each CPU device.
    - `force`: replace a package that is there.
    - `verify`: whether the model must run on the planned sizes, and whether a package that computes differently from
      the model (`Plan.rewrites`) is compared with it. Each package is loaded once in any case.
    - `jobs`: files written at once, and engines built if memory allows; None for as many as there are cores.
    - `build`: how engines are built that are not ONNX files. `fills`: how arrays for inputs are made up.
    - `warn`, `say`: called with deviations from the request, and with results of these checks.

    Raises MisuseError for numbers that mean nothing, and if `package` is taken or can't be written to, ModelError for
    sizes on which the model does not run and for files that ONNX Runtime can't load, SplitcError if the disk is full,
    BuildError for engines that can't be built, OutputsDifferError if the package's outputs differ from the model's.
    """
    target = Path(package)
    _check_request(plan, weights, build, fills, warn)
    _check_numbers(threads, jobs)
    if verify:
        check_sizes_tried(plan.analysis, fills, say)
    needed = least_bytes(plan) if weights == "copy" else 0
    with full_disk_explained(target, needed), written_aside(target, force) as folder:
        writer = PackageWriter(folder)
        written = [
            write_rank(plan.written, number, program, writer, weights == "link")
            for number, program in enumerate(_programs(plan.written))
        ]
        ranks = write_preamble(plan.analysis.preamble, [rank.entry for rank in written], writer)
        _write_weights(written, writer, target, jobs, warn)
        manifest = make_manifest(plan, ranks, writer.files, threads, build.options, fills)
        manifest = write_manifest(folder, manifest)
        compares = plan.rewrites and verify
        with doing("checking the package"):
            if not compares or manifest.slots or manifest.masks or find_kind(plan.engine).is_built:
                check_loads(folder, manifest)  # not all of these files are loaded where the package is compared
            if compares:
                _compare(plan, folder, written, say, warn)
        if find_kind(plan.engine).is_built and not build.later:
            manifest = finish_package(folder, manifest, build, target, jobs)
    return manifest


def _check_request(
    plan: Plan, weights: str, build: BuildSettings, fills: Mapping[str, m.Fill], warn: Callable[[str], None]
) -> None:
    """Raise errors that are known before anything is written; see `compile_model`."""
    if not isinstance(plan, Plan):
        raise MisuseError(
            f"a package is made of a plan, as in compile_model(plan_model('model.onnx', '2xcpu'), 'package'), not of "
            f"{shortened(repr(plan))}"
        )
    check_fills(fills, [value.name or "" for value in plan.analysis.graph.graph.inputs])
    kind = find_kind(plan.engine)
    check_settings(plan.engine, build)
    if kind.is_built and not build.later:
        kind.need_installed()
        find_builder(kind.name).check_here(kind.name)
    if kind.is_built and plan.analysis.graph.optional:
        optional = ", ".join(value.name or "" for value in plan.analysis.graph.optional)
        warn(f"{kind.title} has no optional inputs: these keep the values that the model gives them: {optional}")
    check_weights(weights)


def _check_numbers(threads: int | None, jobs: int | None) -> None:
    threads_for((), threads)
    if jobs is not None:
        whole_number("--jobs", jobs, 1)


def _programs(plan: Plan) -> Iterable[RankProgram]:
    """The ranks' programs, made one at a time unless engines are built for sizes, which depend on all programs."""
    programs = (plan.program(number) for number in range(len(plan.ranks)))
    if find_kind(plan.engine).is_built:
        return fit_to_build(plan.analysis, list(programs))
    return programs


def _write_weights(
    written: Sequence[WrittenRank], writer: PackageWriter, target: Path, jobs: int | None, warn: Callable[[str], None]
) -> None:
    """Write the weights of all ranks, if there is room for them at `target`."""
    files = _files(written)
    check_disk_space(target, sum(tensor.nbytes for file in files for tensor in file.tensors))
    write_weight_files(files, writer, jobs or cores())
    for number, rank in enumerate(written):
        if rank.weights.copies:
            warn(f"{writer.folder.parent} can't hold hard links to the model's data, so rank {number} has a copy")


def least_bytes(plan: Plan) -> int:
    """The bytes that a package has at least, if it has copies of the weights: they may take more in memory."""
    return plan.analysis.costs.weight_bytes(plan.analysis.graph.nodes)


def _compare(
    plan: Plan, folder: Path, written: Sequence[WrittenRank], say: Callable[[str], None], warn: Callable[[str], None]
) -> None:
    """Compare the package with the unsplit model, and say the result."""
    with _runnable(plan, folder, [rank.weights for rank in written]) as runnable:
        verdict = check_outputs(plan, runnable)
    if verdict.compared:
        say(verdict.text)
    else:
        warn(f"the package is unverified: {verdict.text}")


@contextmanager
def _runnable(plan: Plan, folder: Path, weights: Sequence[PlacedWeights]) -> Iterator[Path]:
    """The package in a form that ONNX Runtime runs: if engines are to be built, other graphs with the same weights."""
    if not find_kind(plan.engine).is_built:
        yield folder
        return
    plan, one = replace(plan, engine=ONNXRUNTIME), replace(plan.written, engine=ONNXRUNTIME)
    with tempfile.TemporaryDirectory(prefix="trial-", dir=folder) as place:
        writer = PackageWriter(Path(place))
        ranks = []
        for number, known in enumerate(weights):
            own = writer.folder / f"rank{number}"
            own.mkdir()
            for file in (folder / own.name).glob("*.weights"):
                writer.link(file, own / file.name)
            written = write_rank(one, number, one.program(number), writer, known=known, stem=f"trial{number}")
            ranks.append(written)
        write_weight_files(_files(ranks), writer)
        manifest = make_manifest(plan, [rank.entry for rank in ranks], writer.files, None, m.BuildOptions(), {})
        write_manifest(writer.folder, manifest)
        yield writer.folder


def _files(ranks: Sequence[WrittenRank]) -> list[WeightFile]:
    """The files of weights that are to be written yet."""
    return [rank.weights.file for rank in ranks if rank.weights.file is not None]
