"""A package whose ranks are stages, which other programs can run one after another."""

from __future__ import annotations

from collections.abc import Sequence

from splitc.runtime.engines.kinds import find_kind
from splitc.runtime.errors import MisuseError
from splitc.runtime.package.manifest import EngineFile, Manifest, Rank
from splitc.runtime.package.steps import Reduce


def find_stages(manifest: Manifest, runner: str, engines: Sequence[str] = ("onnxruntime",)) -> list[EngineFile]:
    """The engines of the ranks, in order. Each takes outputs of earlier ones, under the same names.

    Raises MisuseError, which names the `runner`, for engines that are not of these kinds, for ranks that do more than
    run one engine, and for engines with inputs that only this runtime provides.
    """
    if manifest.engine not in engines:
        wanted = " and ".join(f"{find_kind(engine).title}'s" for engine in engines)
        raise MisuseError(f"{runner} runs {wanted} engines, and this package has {manifest.engine}'s")
    check_one_copy(manifest, runner, "layer")
    stages = [_only_engine(manifest, rank, runner) for rank in manifest.ranks]
    if manifest.lengths:
        raise MisuseError(
            f"{runner} gives engines the model's inputs alone, and this package writes its caches in place, for which "
            f"its engines take '{manifest.lengths[0].input}' too: compile with --no-fuse"
        )
    return stages


def check_one_copy(manifest: Manifest, runner: str, mode: str) -> None:
    """Raise MisuseError for a package with several groups of ranks: `runner`, which is for `mode`, would run one."""
    if manifest.replicas:
        raise MisuseError(
            f"{runner} would run one of the {len(manifest.replicas)} groups of devices that divide the rows of a batch "
            f"in this package: compile for one group, with --split-mode {mode} and without --batch-groups"
        )


def _only_engine(manifest: Manifest, rank: Rank, runner: str) -> EngineFile:
    whole = not rank.parts and not any(isinstance(step, Reduce) for step in rank.program)
    if not whole or len(rank.engines) != 1 or rank.engines[0].group:
        mode = manifest.split_mode
        what, instead = f"a package of {mode} mode ranks work on a stage together", "with --split-mode layer"
        if mode == "layer":
            what, instead = "this one ranks take turns within a stage, for weights that are placed", "without these"
        raise MisuseError(f"{runner} runs stages one after the other, and in {what}: compile {instead}")
    return rank.engines[0]
