"""A package's engines for other programs: stages that they run one after another, and what Triton's TensorRT loads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from splitc.runtime.engines.kinds import TENSORRT, find_kind
from splitc.runtime.errors import MisuseError, needed
from splitc.runtime.files.written import link_file
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
    kept = None if manifest.kept_rows is None else manifest.kept_rows.input
    return [replace(stage, inputs=[name for name in stage.inputs if name != kept]) for stage in stages]


def write_stage_file(manifest: Manifest, source: Path, target: Path) -> None:
    """Link a file of the package, or write it: an engine always computes all logits in other programs.

    Raises MisuseError if that needs onnx, which is not installed.
    """
    kept = manifest.kept_rows
    engines = [engine for engine in manifest.engines if source.match(engine.path)]
    if kept is None or not any(kept.input in engine.inputs for engine in engines):
        link_file(source, target)
        return
    with needed(
        "an engine's input for the tokens to keep is removed by onnx, which is not installed: pip install onnx"
    ):
        import onnx
    model = onnx.load(source, load_external_data=False)
    for node in [node for node in model.graph.node if kept.input in node.input]:
        node.CopyFrom(onnx.helper.make_node("Identity", node.input[:1], node.output, node.name))
    for value in [value for value in model.graph.input if value.name == kept.input]:
        model.graph.input.remove(value)
    target.write_bytes(model.SerializeToString())


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


# The first TensorRT whose engines have int64: older ones take int32 where the model has that.
WITH_INT64 = 10
# The first one that the backend runs several ranks with.
WITH_RANKS = 11


def check_loadable(manifest: Manifest, least: int, option: str) -> None:
    """Raise MisuseError unless the engines are TensorRT's, from version `least` on, are built and have their weights.

    `option` is what the user is to leave out if they are not.
    """
    if manifest.engine != TENSORRT or manifest.build is None:
        raise MisuseError(
            f"Triton's TensorRT backend runs engines of TensorRT, and this package has {manifest.engine}'s: compile "
            f"with --engine tensorrt, or leave out {option}"
        )
    built = manifest.build.built
    if built is None:
        raise MisuseError("the engines are not built yet: run 'splitc build' on a machine with the GPUs, then export")
    if int(built.version.split(".")[0]) < least:
        raise MisuseError(
            f"Triton's TensorRT backend needs engines of TensorRT {least} or later here, and these are of "
            f"{built.version}: compile with a later one, or leave out {option}"
        )
    if manifest.build.options.strip_weights:
        raise MisuseError(
            f"the engines have no weights (--strip-weights), and Triton can't add them: compile without it, or leave "
            f"out {option}"
        )
    for engine in manifest.engines:
        if lists := [name for name, sizes in engine.sizes.items() if sizes.values is not None]:
            raise MisuseError(
                f"'{lists[0]}' is a list of sizes, which Triton can't feed to an engine: leave out {option}"
            )
