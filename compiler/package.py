"""Write a package: engines and manifest, beside the place where it will be, and renamed into it when it is whole."""

from __future__ import annotations

import contextlib
import errno
import glob
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Callable, Optional, Union

import onnx_ir as ir

from splitc.compiler.analysis import Analysis
from splitc.compiler.build.onnxruntime import write_engine, write_linked_engine
from splitc.compiler.fills import find_fill
from splitc.compiler.plan import Plan, RankPlan
from splitc.compiler.split.layer import Stage, stage_graph
from splitc.runtime import manifest as m
from splitc.runtime.errors import MisuseError, SplitcError
from splitc.runtime.program import Receive, Run, Send, Step
from splitc.runtime.units import format_bytes
from splitc.runtime.version import VERSION

WEIGHTS = ("copy", "link")


def check_target(target: Path, force: bool) -> None:
    """Raise MisuseError unless a package may be written to `target`."""
    if target.exists() and not force:
        raise MisuseError(f"{target} exists already: choose another name, or replace it with --force")
    if target.exists() and not (target / m.FILE_NAME).exists():
        raise MisuseError(f"{target} exists and is no package, so --force does not replace it")
    if not target.absolute().parent.is_dir():
        raise MisuseError(f"there is no folder {target.absolute().parent} to write the package into")


def compile_model(
    plan: Plan,
    package: Union[str, Path],
    *,
    weights: str = "copy",
    threads: Optional[int] = None,
    force: bool = False,
    progress: Callable[[int], None] = lambda _: None,
    warn: Callable[[str], None] = lambda _: None,
) -> m.Manifest:
    """Build what `plan` says and write it to the folder `package`, replacing a package that is there with `force`.

    `weights` is `copy`, or `link` to refer into hard links of the model's own data files instead of copying it: the
    package then changes when they are written to in place. `threads` is recorded as the number for each CPU device.
    `progress` is told the bytes of weights as they are written, `warn` what is not as asked. Either the whole package
    is written or nothing. Raises MisuseError when `package` can't be written to, SplitcError when the disk is full.
    """
    target = Path(package)
    check_target(target, force)
    if weights not in WEIGHTS:
        raise MisuseError(f"unknown --weights '{weights}': there are {', '.join(WEIGHTS)}")
    needed = sum(rank.memory.weights for rank in plan.ranks) if weights == "copy" else 0
    with _full_disk_explained(target, needed), _written_aside(target) as folder:
        files: list[Path] = []
        links: list[Path] = []
        engines = []
        for number, rank in enumerate(plan.ranks):
            path = folder / f"rank{number}" / f"stage{number}.onnx"
            graph, model = stage_graph(plan.analysis.graph, rank.stage), plan.analysis.graph.model
            if weights == "copy":
                write_engine(graph, model, path, progress)
            else:
                linked, copied = write_linked_engine(graph, model, path, progress)
                links += linked
                if copied:
                    warn(f"{folder.parent} can't hold hard links to the model's data, so rank {number} has a copy")
            files += sorted(path.parent.iterdir())
            engines.append(_engine_file(folder, path, rank.stage))
        manifest = _manifest(plan, engines, m.describe_files(folder, files, links), threads)
        (folder / m.FILE_NAME).write_bytes(m.encode(manifest))
    return manifest


@contextlib.contextmanager
def _written_aside(target: Path) -> Iterator[Path]:
    """A new folder beside `target`, which takes its place if the block ends well and is removed if it does not."""
    parent = target.absolute().parent
    prefix = f".{target.name}.partial-"
    for left in parent.glob(f"{glob.escape(prefix)}*"):  # by a run that was killed
        shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        folder.chmod(0o755)
        yield folder
        replaced = folder.with_name(f"{folder.name}-replaced")
        if target.exists():
            target.rename(replaced)
        folder.rename(target)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def _full_disk_explained(target: Path, needed: int) -> Iterator[None]:
    parent = target.absolute().parent
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise SplitcError(
            f"the disk of {parent} has {format_bytes(free)} free, and the package needs {format_bytes(needed)}"
        )
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise SplitcError(
            f"the disk of {parent} is full: the package needs {format_bytes(needed)}. Nothing was written"
        ) from error


def _engine_file(folder: Path, path: Path, stage: Stage) -> m.EngineFile:
    return m.EngineFile(path.relative_to(folder).as_posix(), _names(stage.takes), _names(stage.gives))


def _names(values: Iterable[ir.Value]) -> list[str]:
    return [value.name or "" for value in values]


def _manifest(plan: Plan, engines: list[m.EngineFile], files: list[m.File], threads: Optional[int]) -> m.Manifest:
    analysis = plan.analysis
    graph = analysis.graph
    return m.Manifest(
        schema=m.SCHEMA,
        splitc=VERSION,
        source=graph.source,
        split_mode=plan.split_mode,
        engine="onnxruntime",
        number_type=number_type(analysis),
        threads=threads,
        inputs=[_input(analysis, value) for value in graph.graph.inputs],
        outputs=[_tensor(value) for value in graph.outputs],
        states=list(analysis.states),
        blocks=[block.name for block in analysis.partition.blocks],
        ranks=[
            _rank(rank, engine, program)
            for rank, engine, program in zip(plan.ranks, engines, layer_programs(plan.ranks))
        ],
        cuts=[m.Cut(_names(cut.values), cut.bytes) for cut in plan.cuts],
        collectives=0,
        unsplit=[],
        files=files,
    )


def _rank(rank: RankPlan, engine: m.EngineFile, program: list[Step]) -> m.Rank:
    return m.Rank(
        device=str(rank.device),
        blocks=[block.name for block in rank.stage.blocks],
        engines=[engine],
        program=program,
        inputs=_names(rank.stage.feeds),
        outputs=_names(rank.stage.outputs),
        weights_bytes=rank.memory.weights,
        activation_bytes=rank.memory.activations,
        cache_bytes=rank.memory.cache,
        total_bytes=rank.memory.total,
    )


def layer_programs(ranks: Sequence[RankPlan]) -> list[list[Step]]:
    """Each rank receives what earlier ones made, runs its stage, and sends what later ones need, straight to them."""
    maker = {value: number for number, rank in enumerate(ranks) for value in rank.stage.sends}
    programs: list[list[Step]] = []
    for number, rank in enumerate(ranks):
        received: list[Step] = [Receive(value.name or "", maker[value]) for value in rank.stage.receives]
        # A channel keeps its order, so a rank must send in the order in which the other receives.
        sent: list[Step] = [
            Send(value.name or "", target)
            for target, other in enumerate(ranks)
            for value in other.stage.receives
            if maker[value] == number
        ]
        programs.append([*received, Run(0), *sent])
    return programs


def _tensor(value: ir.Value) -> m.Tensor:
    if not isinstance(value.type, ir.TensorType):
        raise SplitcError(
            f"'{value.name}' is a {value.type}, and splitc takes models whose inputs and outputs are tensors"
        )
    sizes = [size if isinstance(size, int) else size.value for size in value.shape or ()]
    return m.Tensor(value.name or "", str(value.type.dtype.numpy()), sizes)


def _input(analysis: Analysis, value: ir.Value) -> m.Tensor:
    tensor = _tensor(value)
    shape = list(analysis.shapes[tensor.name])
    return m.Tensor(tensor.name, tensor.dtype, tensor.shape, shape, find_fill(value))


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
