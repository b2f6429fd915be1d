"""Write a package: engines and manifest, beside the place where it will be, and renamed into it when it is whole."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import msgspec
import onnx_ir as ir

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.frontend.binding import Fixed
from splitc.compiler.frontend.made_up import choose_fill
from splitc.compiler.frontend.optional import make_overridable
from splitc.compiler.frontend.roles import find_roles
from splitc.compiler.lowering.programs import names
from splitc.compiler.lowering.rank_forms import COLLECTIVE
from splitc.compiler.model_errors import ModelError
from splitc.compiler.packaging.build_graphs import fit_to_build
from splitc.compiler.packaging.building import Building, BuildSettings, check_buildable, finish_package
from splitc.compiler.packaging.onnx_files import write_engines
from splitc.compiler.packaging.self_check import Verdict, check_loads, verify_package
from splitc.compiler.packaging.staging import check_target, full_disk_explained, written_aside
from splitc.compiler.packaging.tensorrt_build import engine_path
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.plan_file import LISTED
from splitc.compiler.planning.rank_plan import RankPlan
from splitc.compiler.planning.split import RankProgram
from splitc.compiler.sharding.batch import find_batch
from splitc.runtime import manifest as m
from splitc.runtime.engines.kinds import MODULES, ONNXRUNTIME, need_installed
from splitc.runtime.errors import MisuseError
from splitc.runtime.fills import check_fills
from splitc.runtime.onnx_types import KNOWN
from splitc.runtime.package_files import describe_files
from splitc.runtime.version import VERSION

WEIGHTS = ("copy", "link")


def compile_model(
    plan: Plan,
    package: str | Path,
    *,
    weights: str = "copy",
    threads: int | None = None,
    force: bool = False,
    verify: bool = True,
    build: BuildSettings = BuildSettings(),
    fills: Mapping[str, m.Fill] = MappingProxyType({}),
    progress: Callable[[int], None] = lambda _: None,
    building: Building = lambda done, total: None,
    warn: Callable[[str], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> m.Manifest:
    """Build what `plan` says and write it to the folder `package`, replacing a package that is there with `force`.

    `weights` is `copy`, or `link` to refer into hard links of the model's own data files instead of copying it: the
    package then changes when they are written to in place. `threads` is recorded as the number for each CPU device.
    A package in row or tensor mode is compared with the unsplit model before it is in its place, unless `verify` is
    False; any other is loaded once. `build` says how engines are built that are not ONNX files, `fills` how arrays are
    made up for some inputs. `progress` is told the bytes of weights as they are written, `building` how many engines
    are built of how many, `warn` what is not as asked, `say` what came of the comparison. Either the whole package is
    written or nothing.
    Raises MisuseError when `package` can't be written to, ModelError for an input or output that can't be handed over
    and for what ONNX Runtime can't load, SplitcError when the disk is full, BuildError for what TensorRT can't build,
    OutputsDifferError when the package does not compute what the model does.
    """
    target = Path(package)
    check_target(target, force)
    _check_types(plan)
    check_fills(fills, [value.name or "" for value in plan.analysis.graph.graph.inputs])
    if plan.engine in MODULES and not build.later:
        need_installed(plan.engine)
        check_buildable(plan.engine)
    if plan.engine in MODULES and plan.analysis.graph.optional:
        optional = ", ".join(value.name or "" for value in plan.analysis.graph.optional)
        warn(f"TensorRT has no optional inputs: these keep the values that the model gives them: {optional}")
    if weights not in WEIGHTS:
        raise MisuseError(f"unknown --weights '{weights}': there are {', '.join(WEIGHTS)}")
    needed = sum(rank.memory.weights for rank in plan.ranks) if weights == "copy" else 0
    with full_disk_explained(target, needed), written_aside(target) as folder:
        links: list[Path] = []
        ranks = []
        programs: Iterable[RankProgram] = (plan.program(number) for number in range(len(plan.ranks)))
        if plan.engine in MODULES:
            programs = fit_to_build(plan.analysis, list(programs))
        for number, (rank, program) in enumerate(zip(plan.ranks, programs)):
            written = _write_engines(plan, rank, program, folder / f"rank{number}", weights, progress)
            links += written.links
            if written.copies:
                warn(f"{folder.parent} can't hold hard links to the model's data, so rank {number} has a copy")
            ranks.append(_rank(rank, program, written))
        files = [path for path in folder.rglob("*") if path.is_file()]
        manifest = _manifest(plan, ranks, describe_files(folder, files, links), threads, build.options, fills)
        (folder / m.FILE_NAME).write_bytes(m.encode(manifest))
        _try(plan, folder, manifest, verify, warn, say)
        if plan.engine in MODULES and not build.later:
            manifest = finish_package(folder, manifest, build, target, building)
    return manifest


def _try(
    plan: Plan,
    folder: Path,
    manifest: m.Manifest,
    verify: bool,
    warn: Callable[[str], None],
    say: Callable[[str], None],
) -> None:
    """Load what was written, and in row and tensor mode compare it with the model."""
    check_loads(folder, manifest)
    if plan.split.rewrites and verify:
        verdict = _verify(plan, folder)
        if verdict.compared:
            say(verdict.text)
        else:
            warn(f"the package is unverified: {verdict.text}")


def _verify(plan: Plan, folder: Path) -> Verdict:
    """Compare the split with the model, in ONNX Runtime whatever the engines are to be."""
    if plan.engine == ONNXRUNTIME:
        return verify_package(plan, folder)
    with tempfile.TemporaryDirectory(prefix="verify-", dir=folder) as place:
        compile_model(replace(plan, engine=ONNXRUNTIME), Path(place) / "package", verify=False)
        return verify_package(plan, Path(place) / "package")


@dataclass(frozen=True)
class _Written:
    """A rank's engines, their optional inputs, the links, and the copies made where no link could be."""

    engines: list[m.EngineFile]
    overrides: list[m.Override]
    links: list[Path]
    copies: list[Path]


def _write_engines(
    plan: Plan, rank: RankPlan, program: RankProgram, folder: Path, weights: str, progress: Callable[[int], None]
) -> _Written:
    """Write a rank's pieces."""
    graphs = program.graphs
    width = len(str(len(graphs) - 1))
    suffixes = [f".{number:0{width}}" if len(graphs) > 1 else "" for number in range(len(graphs))]
    stage = f"stage{rank.group}"
    paths = [folder / f"{stage}{suffix}.onnx" for suffix in suffixes]
    # Names first: to write a graph changes where its weights are.
    entries = [
        m.EngineFile(f"{folder.name}/{path.name}", names(graph.inputs), names(graph.outputs), _sizes_only(graph))
        for path, graph in zip(paths, graphs)
    ]
    if plan.engine in MODULES:
        group = [n for n, each in enumerate(plan.ranks) if each.group == rank.group]
        entries = [
            _to_build(entry, sizes, group if any(node.op_type == COLLECTIVE for node in graph) else [])
            for entry, sizes, graph in zip(entries, program.sizes, graphs)
        ]
    found = [] if plan.engine in MODULES else [each for graph in graphs for each in make_overridable(graph)]
    overrides = list({each.value: each for each in found}.values())
    links, copies = write_engines(dict(zip(paths, graphs)), plan.analysis.graph.model, weights == "link", progress)
    return _Written(entries, overrides, links, copies)


def _sizes_only(graph: ir.Graph) -> list[str]:
    """The inputs that only Shape and Size read."""
    return [
        value.name or ""
        for value in graph.inputs
        if value.uses() and all(use.node.op_type in ("Shape", "Size") for use in value.uses())
    ]


def _to_build(entry: m.EngineFile, sizes: dict[str, m.Sizes], group: list[int]) -> m.EngineFile:
    """The entry of an engine that is built from the ONNX file of `entry`."""
    source = Path(entry.path)
    path = engine_path(source.parent, source.stem, group)
    return msgspec.structs.replace(entry, path=path.as_posix(), source=entry.path, sizes=sizes, group=group)


def _manifest(
    plan: Plan,
    ranks: list[m.Rank],
    files: list[m.File],
    threads: int | None,
    options: m.BuildOptions,
    fills: Mapping[str, m.Fill],
) -> m.Manifest:
    analysis = plan.analysis
    graph = analysis.graph
    return m.Manifest(
        schema=m.SCHEMA,
        splitc=VERSION,
        source=graph.source,
        split_mode=plan.split_mode,
        engine=plan.engine,
        number_type=number_type(analysis),
        threads=threads,
        inputs=_inputs(plan, fills),
        outputs=[_tensor(value) for value in graph.outputs],
        states=list(analysis.states),
        batch=find_batch(graph, plan.split.axis_map),
        blocks=[block.name for block in analysis.partition.blocks],
        ranks=ranks,
        cuts=[m.Cut(names(cut.values), cut.bytes) for cut in plan.cuts],
        collectives=plan.split.collectives,
        unsplit=[
            m.UnsplitWeight(each.name, each.bytes - each.split, each.reason)
            for each in plan.weights
            if each.reason and each.bytes - each.split >= LISTED
        ],
        files=files,
        build=m.Build(options) if plan.engine in MODULES else None,
        fixed=[_fixed(each) for each in graph.fixed],
        optional=[] if plan.engine in MODULES else [_tensor(value) for value in graph.optional],
    )


def _rank(rank: RankPlan, program: RankProgram, written: _Written) -> m.Rank:
    return m.Rank(
        device=str(rank.device),
        blocks=[block.name for block in rank.stage.blocks],
        engines=written.engines,
        program=list(program.steps),
        inputs=list(program.inputs),
        outputs=list(program.outputs),
        parts=list(program.parts),
        keeps=list(program.keeps),
        weights_bytes=rank.memory.weights,
        activation_bytes=rank.memory.activations,
        cache_bytes=rank.memory.cache,
        total_bytes=rank.memory.total,
        overrides=written.overrides,
    )


def _fixed(fixed: Fixed) -> m.FixedInput:
    tensor = _tensor(fixed.input)
    shape = tensor.shape if fixed.value is None else list(fixed.value.shape)
    return m.FixedInput(tensor.name, tensor.dtype, shape, None if fixed.value is None else fixed.value.tolist())


def _check_types(plan: Plan) -> None:
    """Raise ModelError for a value that has to be handed over, and is of a type that can't be."""
    graph = plan.analysis.graph
    places = {"input": graph.graph.inputs, "output": graph.outputs}
    crossing = (value for cut in plan.cuts for value in cut.values)
    for place, values in {**places, "value that crosses a cut": crossing}.items():
        for value in values:
            if not isinstance(value.type, ir.TensorType):
                raise ModelError(f"the {place} '{value.name}' is a {value.type}, and splitc hands over only tensors")
            if value.type.dtype == ir.DataType.STRING or str(value.type.dtype.numpy()) not in KNOWN:
                raise ModelError(
                    f"the {place} '{value.name}' is of type {value.type.dtype.name}, which ONNX Runtime does not hand "
                    f"over in Python. What it does: {', '.join(KNOWN)}. Let the model begin and end with a Cast"
                )


def _tensor(value: ir.Value) -> m.Tensor:
    assert isinstance(value.type, ir.TensorType)
    shape = value.shape
    sizes = None if shape is None else [size if isinstance(size, int) else size.value for size in shape]
    return m.Tensor(value.name or "", str(value.type.dtype.numpy()), sizes)


def _inputs(plan: Plan, fills: Mapping[str, m.Fill]) -> list[m.Tensor]:
    graph = plan.analysis.graph
    roles = find_roles(graph)
    return [_input(plan, value, roles.get(value), fills.get(value.name or "")) for value in graph.graph.inputs]


def _input(plan: Plan, value: ir.Value, role: m.Role | None, asked: m.Fill | None) -> m.Tensor:
    analysis, tensor = plan.analysis, _tensor(value)
    low, typical, high = (list(each[tensor.name]) for each in (analysis.smallest, analysis.typical, analysis.shapes))
    built = plan.engine in MODULES
    least, most = (low, high) if built else (None, None)
    # What is split along axes, or built, is so for as many dimensions as were planned for.
    fixed = tensor.shape is None and (built or plan.split.fixes_ranks)
    shape: m.Shape = [*high] if fixed else tensor.shape
    fill = asked or choose_fill(value, role)
    return m.Tensor(tensor.name, tensor.dtype, shape, typical, fill, least, most, role)


def number_type(analysis: Analysis) -> str:
    """The least precise type that holds a tenth of the weights or more; outputs can't agree more closely than it."""
    sizes: dict[str, int] = {}
    for weight in analysis.costs.weights(analysis.graph.nodes):
        if weight.dtype is not None:
            kind = f"int{weight.dtype.bitwidth}" if weight.dtype.is_integer() else str(weight.dtype.numpy())
            sizes[kind] = sizes.get(kind, 0) + analysis.costs.value_bytes(weight)
    order = ["int4", "int2", "int8", "bfloat16", "float16", "float32"]
    held = [kind for kind in order if 10 * sizes.get(kind, 0) >= sum(sizes.values()) > 0]
    return held[0] if held else "float32"
