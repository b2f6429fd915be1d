"""Write a package: engines and manifest, beside the place where it will be, and renamed into it when it is whole."""

from __future__ import annotations

import contextlib
import errno
import glob
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Callable, Optional, Union

import onnx_ir as ir

from splitc.compiler.analysis import Analysis
from splitc.compiler.batch import find_batch
from splitc.compiler.build.onnxruntime import write_engines
from splitc.compiler.fills import find_fill
from splitc.compiler.plan import Plan, RankPlan
from splitc.compiler.plan_file import LISTED
from splitc.compiler.programs import RankProgram, names, rank_program
from splitc.compiler.verify import verify_package
from splitc.runtime import manifest as m
from splitc.runtime.errors import MisuseError, SplitcError
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
    verify: bool = True,
    progress: Callable[[int], None] = lambda _: None,
    warn: Callable[[str], None] = lambda _: None,
) -> m.Manifest:
    """Build what `plan` says and write it to the folder `package`, replacing a package that is there with `force`.

    `weights` is `copy`, or `link` to refer into hard links of the model's own data files instead of copying it: the
    package then changes when they are written to in place. `threads` is recorded as the number for each CPU device.
    A package in row or tensor mode is compared with the unsplit model before it is in its place, unless `verify` is
    False.
    `progress` is told the bytes of weights as they are written, `warn` what is not as asked. Either the whole package
    is written or nothing. Raises MisuseError when `package` can't be written to, SplitcError when the disk is full,
    OutputsDifferError when the package does not compute what the model does.
    """
    target = Path(package)
    check_target(target, force)
    if weights not in WEIGHTS:
        raise MisuseError(f"unknown --weights '{weights}': there are {', '.join(WEIGHTS)}")
    needed = sum(rank.memory.weights for rank in plan.ranks) if weights == "copy" else 0
    with _full_disk_explained(target, needed), _written_aside(target) as folder:
        links: list[Path] = []
        ranks = []
        for number, rank in enumerate(plan.ranks):
            program = rank_program(plan, number)
            engines, linked, copied = _write_engines(plan, rank, program, folder / f"rank{number}", weights, progress)
            links += linked
            if copied:
                warn(f"{folder.parent} can't hold hard links to the model's data, so rank {number} has a copy")
            ranks.append(_rank(rank, program, engines))
        files = [path for path in folder.rglob("*") if path.is_file()]
        manifest = _manifest(plan, ranks, m.describe_files(folder, files, links), threads)
        (folder / m.FILE_NAME).write_bytes(m.encode(manifest))
        if plan.split_mode != "layer" and verify and (reason := verify_package(plan, folder)):
            warn(f"the package is unverified: {reason}")
    return manifest


def _write_engines(
    plan: Plan, rank: RankPlan, program: RankProgram, folder: Path, weights: str, progress: Callable[[int], None]
) -> tuple[list[m.EngineFile], list[Path], list[Path]]:
    """Write a rank's pieces. Returns their entries, the links, and the copies made where no link could be."""
    pieces = [piece.graph for piece in program.pieces if piece.graph.outputs]
    width = len(str(len(pieces) - 1))
    suffixes = [f".{number:0{width}}" if len(pieces) > 1 else "" for number in range(len(pieces))]
    stage = f"stage{rank.group}"
    paths = [folder / f"{stage}{suffix}.onnx" for suffix in suffixes]
    # Names first: to write a graph changes where its weights are.
    entries = [
        m.EngineFile(f"{folder.name}/{path.name}", names(graph.inputs), names(graph.outputs))
        for path, graph in zip(paths, pieces)
    ]
    links, copies = write_engines(dict(zip(paths, pieces)), plan.analysis.graph.model, weights == "link", progress)
    return entries, links, copies


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


def _manifest(plan: Plan, ranks: list[m.Rank], files: list[m.File], threads: Optional[int]) -> m.Manifest:
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
        batch=find_batch(plan),
        blocks=[block.name for block in analysis.partition.blocks],
        ranks=ranks,
        cuts=[m.Cut(names(cut.values), cut.bytes) for cut in plan.cuts],
        collectives=plan.collectives,
        unsplit=[
            m.UnsplitWeight(each.name, each.bytes - each.split, each.reason)
            for each in plan.weights
            if each.reason and each.bytes - each.split >= LISTED
        ],
        files=files,
    )


def _rank(rank: RankPlan, program: RankProgram, engines: list[m.EngineFile]) -> m.Rank:
    return m.Rank(
        device=str(rank.device),
        blocks=[block.name for block in rank.stage.blocks],
        engines=engines,
        program=list(program.steps),
        inputs=list(program.inputs),
        outputs=list(program.outputs),
        parts=list(program.parts),
        keeps=list(program.keeps),
        weights_bytes=rank.memory.weights,
        activation_bytes=rank.memory.activations,
        cache_bytes=rank.memory.cache,
        total_bytes=rank.memory.total,
    )


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
