"""Compile a plan into a package: engines and a manifest. The package appears at its place only when it is complete."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import msgspec
import onnx_ir as ir

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.errors import CannotSplitError
from splitc.compiler.frontend.optional import make_overridable
from splitc.compiler.frontend.slots import need_slots, without_slots
from splitc.compiler.frontend.unused import remove_unused
from splitc.compiler.lowering.communication import communicates
from splitc.compiler.lowering.gpu_fusions import fuse_for_gpus
from splitc.compiler.lowering.gpu_sizes import decompose_for_gpus, keep_on_gpu
from splitc.compiler.lowering.session_weights import multiply_as_stored
from splitc.compiler.lowering.several_rows import take_several_rows
from splitc.compiler.packaging.builder import find_builder
from splitc.compiler.packaging.building import BuildSettings, check_settings, finish_package
from splitc.compiler.packaging.engine_entries import are_shareable, engine_entry, shareable_weights, written_entry
from splitc.compiler.packaging.manifest_entries import make_manifest, rank_entry
from splitc.compiler.packaging.onnx_files import NONE, PlacedWeights, write_graphs
from splitc.compiler.packaging.self_check import check_loads, check_outputs, check_sizes_tried
from splitc.compiler.packaging.staging import check_disk_space, check_weights, full_disk_explained, written_aside
from splitc.compiler.packaging.unmasked import without_masks, write_preamble
from splitc.compiler.packaging.weight_files import WeightFile, write_weight_files
from splitc.compiler.packaging.writer import PackageWriter
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.split import RankProgram
from splitc.runtime.engines.kinds import ONNXRUNTIME, find_kind
from splitc.runtime.feeds.fills import check_fills
from splitc.runtime.hardware.devices import cores, threads_for
from splitc.runtime.package import manifest as m
from splitc.runtime.package.manifest_file import write_manifest
from splitc.runtime.threads.garbage import rare_garbage
from splitc.runtime.threads.progress import doing
from splitc.runtime.units import whole_number


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
    - `verify`: whether the model must run on the planned sizes, and whether a package that computes otherwise than the
      model (`Plan.rewrites`) is compared with it. Each package is loaded once in any case.
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
            _write_rank(plan.written, number, program, writer, weights == "link")
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
        return find_builder(plan.engine).prepare(plan.analysis, list(programs))
    return programs


def _write_weights(
    written: Sequence[_Written], writer: PackageWriter, target: Path, jobs: int | None, warn: Callable[[str], None]
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
    plan: Plan, folder: Path, written: Sequence[_Written], say: Callable[[str], None], warn: Callable[[str], None]
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
            written = _write_rank(one, number, one.program(number), writer, known=known, stem=f"trial{number}")
            ranks.append(written)
        write_weight_files(_files(ranks), writer)
        manifest = make_manifest(plan, [rank.entry for rank in ranks], writer.files, None, m.BuildOptions(), {})
        write_manifest(writer.folder, manifest)
        yield writer.folder


@dataclass(frozen=True)
class _Written:
    """A rank's entry in the manifest, and where its weights lie."""

    entry: m.Rank
    weights: PlacedWeights


def _files(ranks: Sequence[_Written]) -> list[WeightFile]:
    """The files of weights that are to be written yet."""
    return [rank.weights.file for rank in ranks if rank.weights.file is not None]


def _suit_gpu(graphs: Sequence[ir.Graph], analysis: Analysis) -> None:
    """Let engines of ONNX Runtime be captured, have fewer operators, and share their weights, in place."""
    shapes = analysis.costs.bound.shapes
    for graph in graphs:
        keep_on_gpu(graph, analysis.graph.model.opset_imports.get("", 1), shapes)
        multiply_as_stored(graph)
        remove_unused(graph)
        if analysis.fuses:
            # Slots for adapters are taken out of a graph again, so sums with them may not be part of something else.
            fuse_for_gpus(graph, shapes, rows=not analysis.slots)


def _write_rank(
    plan: Plan,
    number: int,
    program: RankProgram,
    writer: PackageWriter,
    link: bool = False,
    known: PlacedWeights = NONE,
    stem: str | None = None,
) -> _Written:
    """Write a rank's graphs, in files named by `stem` or their stage. Weights in `known` are in its folder already."""
    rank, folder = plan.ranks[number], writer.folder / f"rank{number}"
    on_gpu = plan.engine == ONNXRUNTIME and rank.device.kind == "cuda"
    if on_gpu:
        _suit_gpu(program.graphs, plan.analysis)
    elif plan.engine == ONNXRUNTIME:
        for graph in program.graphs:
            take_several_rows(graph)
    paths = _graph_paths(folder, stem or f"stage{rank.group}", len(program.graphs))
    # Entries come first, since writing a graph changes its weights.
    uncertain = plan.analysis.costs.bound.uncertain
    entries = [
        engine_entry(f"{folder.name}/{path.name}", graph, program.group, uncertain, on_gpu)
        for path, graph in zip(paths, program.graphs, strict=True)
    ]
    plain = _without_slots(plan, program.graphs)
    overrides: dict[str, m.Override] = {}
    if find_kind(plan.engine).is_built:
        parts = zip(entries, program.sizes, strict=True)
        entries = [_to_build(plan.engine, entry, sizes) for entry, sizes in parts]
    else:
        overrides = {override.value: override for graph in program.graphs for override in make_overridable(graph)}
        slots = [tensor.name for tensor in m.slot_tensors(plan.analysis.slots)]
        for one, graph in zip(plain, program.graphs, strict=True):
            if one is not None:
                make_overridable(one)
                need_slots(graph, slots)
    graphs = {path: one or graph for path, one, graph in zip(paths, plain, program.graphs, strict=True)}
    adapted = {_adapted(path): graph for path, one, graph in zip(paths, plain, program.graphs, strict=True) if one}
    unmasked = _without_masks(plan, graphs)
    model, forms = plan.analysis.graph.model, {**graphs, **adapted, **unmasked}
    if on_gpu:  # after masks were left out, which only the operator shows
        for graph in forms.values():
            decompose_for_gpus(graph, model.opset_imports.get("", 1), plan.analysis.costs.bound.shapes)
    pairs = zip(entries, graphs.values(), strict=True)
    entries = [msgspec.structs.replace(entry, **written_entry(graph, on_gpu)) for entry, graph in pairs]
    weights = write_graphs(forms, model, writer, link, known)
    if not find_kind(plan.engine).is_built:
        entries = [
            msgspec.structs.replace(
                entry,
                weights=shareable_weights(graph),
                adapted=_relative(_adapted(path), adapted),
                unmasked=_relative(_unmasked(path), unmasked),
            )
            for entry, (path, graph) in zip(entries, graphs.items(), strict=True)
        ]
    return _Written(rank_entry(rank, program, entries, list(overrides.values())), weights)


def _without_slots(plan: Plan, graphs: Sequence[ir.Graph]) -> list[ir.Graph | None]:
    """Each of a rank's graphs without slots; None for one that has none.

    Raises CannotSplitError where slots are reduced by themselves.
    """
    plain = [without_slots(graph) if plan.analysis.slots else None for graph in graphs]
    for one, graph in zip(plain, graphs, strict=True):
        if one is not None and sum(map(communicates, one)) != sum(map(communicates, graph)):
            raise CannotSplitError(
                "the slots for adapters need collectives of their own in this split: use another --split-mode, or "
                "leave out --lora-slots and merge adapters with --lora"
            )
    return plain


def _adapted(path: Path) -> Path:
    """The path of the graph with slots, beside that of the one without."""
    return path.with_name(f"{path.stem}.adapted.onnx")


def _without_masks(plan: Plan, graphs: Mapping[Path, ir.Graph]) -> dict[Path, ir.Graph]:
    """A rank's graph without masks, by its path: of a rank with one graph, whose forms share their weights."""
    preamble = plan.analysis.preamble
    if preamble is None or len(graphs) != 1 or find_kind(plan.engine).is_built:
        return {}
    ((path, graph),) = graphs.items()
    weights = {name: value.const_value for name, value in graph.initializers.items() if value.const_value is not None}
    if not are_shareable(weights, graph):
        return {}
    form = without_masks(graph, preamble)
    return {} if form is None else {_unmasked(path): form}


def _unmasked(path: Path) -> Path:
    """The path of the graph without masks, beside that of the one with them."""
    return path.with_name(f"{path.stem}.unmasked.onnx")


def _relative(path: Path, among: Collection[Path]) -> str | None:
    """The path of one of a rank's files from the package's folder; None if it is not among them."""
    return f"{path.parent.name}/{path.name}" if path in among else None


def _graph_paths(folder: Path, stage: str, count: int) -> list[Path]:
    """The paths of a stage's graphs, numbered if there are several."""
    width = len(str(count - 1))
    return [folder / (f"{stage}.{number:0{width}}.onnx" if count > 1 else f"{stage}.onnx") for number in range(count)]


def _to_build(engine: str, entry: m.EngineFile, sizes: dict[str, m.Sizes]) -> m.EngineFile:
    """The manifest's entry for the engine that is built from the ONNX file of `entry`."""
    source = Path(entry.path)
    path = find_builder(engine).engine_path(source.parent, source.stem, entry.group)
    return msgspec.structs.replace(entry, path=path.as_posix(), source=entry.path, sizes=sizes, convolves=False)
