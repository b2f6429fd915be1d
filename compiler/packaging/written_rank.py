"""Write a rank's graphs in the forms that its engines run, and its entry in the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import onnx_ir as ir

from splitc.compiler.adapters.slots import need_slots, without_slots
from splitc.compiler.engine_graphs.gpu_fusions import fuse_for_gpus
from splitc.compiler.engine_graphs.gpu_sizes import decompose_for_gpus, keep_on_gpu
from splitc.compiler.engine_graphs.session_weights import multiply_as_stored
from splitc.compiler.engine_graphs.several_rows import take_several_rows
from splitc.compiler.errors import CannotSplitError
from splitc.compiler.graphs.optional import make_overridable
from splitc.compiler.graphs.unused import remove_unused
from splitc.compiler.lowering.communication import communicates
from splitc.compiler.packaging.building import find_builder
from splitc.compiler.packaging.engine_entries import are_shareable, engine_entry, shareable_weights, written_fields
from splitc.compiler.packaging.manifest_entries import rank_entry
from splitc.compiler.packaging.onnx_files import NONE, PlacedWeights, write_graphs
from splitc.compiler.packaging.unmasked import without_masks
from splitc.compiler.packaging.writer import PackageWriter
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.split import RankProgram
from splitc.runtime.engines.kinds import ONNXRUNTIME, find_kind
from splitc.runtime.package import manifest as m


@dataclass(frozen=True)
class WrittenRank:
    """A rank's entry in the manifest, and where its weights lie."""

    entry: m.Rank
    weights: PlacedWeights


@dataclass(frozen=True)
class _Engine:
    """An engine to be written: its entry, and its graphs, which share their weights.

    - `overrides`: its weights that are optional inputs.
    - `adapted`: the graph with slots for adapters. `unmasked`: the graph for requests that mask nothing.
    """

    path: Path
    entry: m.EngineFile
    graph: ir.Graph
    overrides: Sequence[m.Override] = ()
    adapted: ir.Graph | None = None
    unmasked: ir.Graph | None = None

    @property
    def graphs(self) -> dict[Path, ir.Graph]:
        """The graphs by the paths of their files. A form's file lies beside the engine's."""
        forms = {self.path: self.graph, self._beside("adapted"): self.adapted, self._beside("unmasked"): self.unmasked}
        return {path: graph for path, graph in forms.items() if graph is not None}

    def written(self, on_gpu: bool) -> _Engine:
        """With the fields that depend on the written files: the weights that sessions share, and the forms' paths."""
        adapted, unmasked = (
            None if graph is None else f"{self.path.parent.name}/{self._beside(form).name}"
            for form, graph in (("adapted", self.adapted), ("unmasked", self.unmasked))
        )
        return self.with_fields(weights=shareable_weights(self.graph, on_gpu), adapted=adapted, unmasked=unmasked)

    def with_fields(self, **fields: Any) -> _Engine:
        """The engine with these fields of its entry."""
        return replace(self, entry=msgspec.structs.replace(self.entry, **fields))

    def _beside(self, form: str) -> Path:
        return self.path.with_name(f"{self.path.stem}.{form}.onnx")


def write_rank(
    plan: Plan,
    number: int,
    program: RankProgram,
    writer: PackageWriter,
    link: bool = False,
    known: PlacedWeights = NONE,
    stem: str | None = None,
) -> WrittenRank:
    """Write a rank's graphs, in files named by `stem` or their stage. Weights in `known` are in its folder already.

    Raises CannotSplitError where slots for adapters are reduced by themselves.
    """
    rank, is_built = plan.ranks[number], find_kind(plan.engine).is_built
    on_gpu = plan.engine == ONNXRUNTIME and rank.device.kind == "cuda"
    _rewrite_for_onnxruntime(plan, program.graphs, on_gpu)
    paths = _graph_paths(writer.folder / f"rank{number}", stem or f"stage{rank.group}", len(program.graphs))
    engines = [
        _Engine(path, _entry(plan, path, graph, program, on_gpu), graph)
        for path, graph in zip(paths, program.graphs, strict=True)
    ]
    if is_built:
        engines = [_to_build(plan.engine, one, sizes) for one, sizes in zip(engines, program.sizes, strict=True)]
    else:
        engines = [_with_forms(plan, engine, on_gpu, is_alone=len(engines) == 1) for engine in engines]
    if on_gpu:  # after masks were left out, which only the operator shows
        for engine in engines:
            for graph in engine.graphs.values():
                decompose_for_gpus(graph, plan.analysis.costs.bound.shapes)
    engines = [engine.with_fields(**written_fields(engine.graph, on_gpu)) for engine in engines]
    graphs = {path: graph for engine in engines for path, graph in engine.graphs.items()}
    weights = write_graphs(graphs, plan.analysis.graph.model, writer, link, known)
    entries = [(engine if is_built else engine.written(on_gpu)).entry for engine in engines]
    overrides = {override.value: override for engine in engines for override in engine.overrides}
    return WrittenRank(rank_entry(rank, program, entries, list(overrides.values())), weights)


def _rewrite_for_onnxruntime(plan: Plan, graphs: Sequence[ir.Graph], on_gpu: bool) -> None:
    """Rewrite graphs in place, if ONNX Runtime runs them: on a GPU for capture, fewer nodes and shared weights."""
    if plan.engine != ONNXRUNTIME:
        return
    shapes = plan.analysis.costs.bound.shapes
    for graph in graphs:
        if not on_gpu:
            take_several_rows(graph)
            continue
        keep_on_gpu(graph, shapes)
        multiply_as_stored(graph)
        remove_unused(graph)
        if plan.analysis.fuses:
            # Slots for adapters are taken out of a graph again, so sums with them may not be part of something else.
            fuse_for_gpus(graph, shapes, rows=not plan.analysis.slots)


def _entry(plan: Plan, path: Path, graph: ir.Graph, program: RankProgram, on_gpu: bool) -> m.EngineFile:
    """The entry of the file that the graph will be written to. Writing it changes its weights, so this is first."""
    return engine_entry(
        f"{path.parent.name}/{path.name}", graph, program.group, plan.analysis.costs.bound.uncertain, on_gpu
    )


def _to_build(name: str, engine: _Engine, sizes: dict[str, m.Sizes]) -> _Engine:
    """The engine of the kind `name` that is built from the file."""
    entry = engine.entry
    path = find_builder(name).engine_path(Path(entry.path).parent, engine.path.stem, entry.group)
    return engine.with_fields(path=path.as_posix(), source=entry.path, sizes=sizes, convolves=False)


def _with_forms(plan: Plan, engine: _Engine, on_gpu: bool, is_alone: bool) -> _Engine:
    """The engine with weights that are optional inputs, and with its other forms.

    A graph with slots for adapters becomes a form, beside the one without. Only an engine that `is_alone` on its rank
    has a form without masks.
    """
    plain = _without_slots(plan, engine.graph)
    engine = replace(engine, overrides=make_overridable(engine.graph))
    if plain is not None:
        make_overridable(plain)
        need_slots(engine.graph, [tensor.name for tensor in m.slot_tensors(plan.analysis.slots)])
        engine = replace(engine, graph=plain, adapted=engine.graph)
    if plan.analysis.preamble is None or not is_alone:
        return engine
    weights = {name: value.const_value for name, value in engine.graph.initializers.items()}
    known = {name: tensor for name, tensor in weights.items() if tensor is not None}
    if not are_shareable(known, engine.graph, on_gpu):
        return engine
    return replace(engine, unmasked=without_masks(engine.graph, plan.analysis.preamble))


def _without_slots(plan: Plan, graph: ir.Graph) -> ir.Graph | None:
    """A copy of the graph without slots for adapters; None if it has none."""
    plain = without_slots(graph) if plan.analysis.slots else None
    if plain is not None and sum(map(communicates, plain)) != sum(map(communicates, graph)):
        raise CannotSplitError(
            "the slots for adapters need collectives of their own in this split: use another --split-mode, or "
            "leave out --lora-slots and merge adapters with --lora"
        )
    return plain


def _graph_paths(folder: Path, stage: str, count: int) -> list[Path]:
    """The paths of a stage's graphs, numbered if there are several."""
    width = len(str(count - 1))
    return [folder / (f"{stage}.{number:0{width}}.onnx" if count > 1 else f"{stage}.onnx") for number in range(count)]
