"""Tables of a package's contents on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from splitc.runtime.cli.terminal import fitted, out, print_table
from splitc.runtime.engines import operator_library
from splitc.runtime.engines.kinds import ONNXRUNTIME, find_kind
from splitc.runtime.gpu.replayable import why_not_replayed
from splitc.runtime.hardware.devices import device_named
from splitc.runtime.package.manifest import LISTED, Built, Cut, FixedInput, Manifest, Tensor
from splitc.runtime.package.mode_words import mode_in_words, words_of
from splitc.runtime.package.pipeline_file import PipelineFile
from splitc.runtime.package.states import State
from splitc.runtime.package.unfolded import count_groups
from splitc.runtime.tools.module_sums import IN_TURN, sum_modules
from splitc.runtime.units import block_range, first_few, format_bytes, format_shape, plural


def print_manifest(manifest: Manifest, routes: Mapping[str, Sequence[str]]) -> None:
    """Print a package's contents, and how its values are copied between GPUs of this machine."""
    out.print(
        f"{manifest.source.name}: {manifest.split_mode} mode, {ranks_in_words(manifest)}, "
        f"{plural(len(manifest.blocks), 'block')}, {manifest.engine} engines, {manifest.number_type}"
    )
    words = words_of(manifest.split_mode)
    for merged in manifest.merged:
        out.print(f"adapter {merged.name} x {merged.scale:g} is merged into {merged.layers} layers")
    if manifest.slots:
        out.print(f"{len(manifest.slots)} layers take adapters (--adapter)")
    if manifest.build is not None:
        built = manifest.build.built
        missing = "not built yet: run 'splitc build' on the machine where it will run"
        out.print(missing if built is None else f"built with version {describe_built(built)}")
    rows = []
    for number, rank in enumerate(manifest.ranks):
        sizes = map(format_bytes, (rank.weights_bytes, rank.activation_bytes, rank.cache_bytes))
        blocks = block_range([fitted(block, out.width // 5) for block in rank.blocks])
        rows.append([f"{number} {rank.device}", blocks, *sizes])
    print_table(("rank", "blocks", *RANK_SIZES), rows, right=RANK_SIZES)
    print_cuts(manifest.cuts, words.is_radial, len(manifest.ranks))
    if manifest.collectives:
        out.print(f"{manifest.collectives} {words.exchanges} a run")
    if (text := describe_collectives(manifest)) is not None:
        out.print(text)
    whole = [(weight.name, weight.bytes, weight.reason) for weight in manifest.unsplit]
    print_whole(whole, manifest.split_mode, f" of {format_bytes(LISTED)} or more")
    if (text := describe_replays(manifest)) is not None:
        out.print(text)
    for way, pairs in routes.items():
        out.print(f"between GPUs of this machine: {', '.join(pairs)} {way}")
    out.print()
    width = out.width - NAMELESS
    described = [
        (kind, fitted(tensor.name, width), tensor.dtype, format_shape(tensor.shape), _describe_role(tensor))
        for kind, tensors in manifest.tensors.items()
        for tensor in tensors
    ]
    print_table(("", "name", "type", "shape", "role"), described)
    if manifest.states:
        pairs = [f"{state.input} -> {state.output}" for state in manifest.states]
        out.print(f"{plural(len(pairs), 'state')}: {first_few(pairs)}")


def describe_replays(manifest: Manifest) -> str | None:
    """Whether requests of known shapes are replayed as CUDA graphs, or why not; None without engines that could be."""
    on_gpus = [rank for rank in manifest.ranks if device_named(rank.device).kind == "cuda"]
    reasons = [why_not_replayed(rank, file) for rank in on_gpus for file in rank.engines]
    if manifest.engine != ONNXRUNTIME or not reasons:
        return None
    return replays_text("; ".join(dict.fromkeys(filter(None, reasons))), manifest.states)


def replays_text(why_not: str, states: Sequence[State]) -> str:
    """Whether requests are replayed on GPUs, and if not, why not. Tokens after others never are if `states` grow."""
    if why_not:
        return f"not replayed as CUDA graphs: {why_not}"
    growing = [state.input for state in states if state.grows is not None and not state.in_place]
    text = "requests of known shapes: CUDA graphs"
    if not growing:
        return text
    count = "1 cache is" if len(growing) == 1 else f"{len(growing)} caches are"
    return f"{text}; not tokens of a sequence: {count} longer after each, '{growing[0]}' first"


def print_modules(manifests: Mapping[str, Manifest], pipeline: PipelineFile) -> None:
    """Print the modules of a package, their bytes on each device, and the sum of each device."""
    rows = []
    for name, manifest in manifests.items():
        for number, rank in enumerate(manifest.ranks):
            sizes = [rank.weights_bytes, rank.activation_bytes, rank.cache_bytes]
            ranks = len(manifest.ranks)
            title = module_title(name, manifest.split_mode, ranks, count_groups(manifest, ranks))
            rows.append(["" if number else title, rank.device, *map(format_bytes, sizes)])
    for number, (device, held) in enumerate(sum_modules(manifests, pipeline.swap).items()):
        sizes = [held.weights, held.activations, held.cache]
        rows.append(["" if number else "all", device, *map(format_bytes, sizes)])
    print_table(("module", "device", *RANK_SIZES), rows, right=RANK_SIZES)
    if pipeline.swap:
        out.print(IN_TURN)
    if pipeline.files:
        out.print(f"other files: {', '.join(file.path for file in pipeline.files)}")
    out.print("details of one: --module NAME")


def ranks_in_words(manifest: Manifest) -> str:
    """The number of ranks, and of groups that each have the whole model."""
    groups, ranks = count_groups(manifest, len(manifest.ranks)), plural(len(manifest.ranks), "rank")
    return ranks + (f" in {groups} groups, each with the whole model" if groups > 1 else "")


def module_title(name: str, split_mode: str, ranks: int, groups: int) -> str:
    """A module's name for tables, with its mode if it is split."""
    return f"{name}, {mode_in_words(split_mode, ranks, groups)}" if ranks > 1 else name


def _describe_role(tensor: Tensor | FixedInput) -> str:
    if isinstance(tensor, FixedInput):
        return "nothing reads it" if tensor.value is None else f"is {tensor.value}"
    if (role := tensor.role) is None:
        return ""
    return f"{role.kind} below {role.rows}" if role.rows else role.kind


def describe_built(built: Built) -> str:
    """The version that engines were built with, and the GPU they were built on."""
    where = f" on {built.gpu} (compute capability {built.compute_capability})" if built.gpu else ""
    return f"{built.version}{where}"


# The columns of characters of a table of tensors beside the names.
NAMELESS = 46
RANK_SIZES = ("weights", "activ.", "cache")

# The most unsplit weights that are listed one by one.
WHOLE = 5


def print_whole(weights: Sequence[tuple[str, int, str]], split_mode: str, which: str = "") -> None:
    """Print the weights that were not split, the largest ones with the reason. `which` says of what size they are."""
    if not weights:
        return
    total = format_bytes(sum(size for _, size, _ in weights))
    largest = ", the largest" * (len(weights) > WHOLE)
    out.print(f"whole on {words_of(split_mode).whole}: {total} in {plural(len(weights), 'weight')}{which}{largest}:")
    for name, size, reason in sorted(weights, key=lambda weight: -weight[1])[:WHOLE]:
        out.print(f"  {fitted(name, out.width // 2)} {format_bytes(size)}: {reason}")


def print_cuts(cuts: Sequence[Cut], from_main: bool, ranks: int) -> None:
    """Print the values that cross each cut: between consecutive ranks, or between the main rank and each other rank.

    Detours go to the last of the `ranks`.
    """
    first = ranks - len(cuts)
    for number, cut in enumerate(cuts):
        names = cut.values
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        place = f"detour to rank {first + number}" if cut.detour else f"cut {0 if from_main else number}-{number + 1}"
        start = f"{place}: {format_bytes(cut.bytes)} a run ("
        width = out.width - len(start) - len(more) - 1
        listed = ", ".join(fitted(name, width // min(3, len(names)) - 2) for name in names[:3]) + more
        out.print(f"{start}{listed or 'nothing'})")


def describe_collectives(manifest: Manifest) -> str | None:
    """A sentence for the user; None for a package without collectives."""
    if any(engine.group for engine in manifest.engines):
        return "each rank is one engine, with its collectives inside"
    if not manifest.collectives:
        return None
    most = max(len(rank.engines) for rank in manifest.ranks)
    text = f"each rank is up to {most} engines, with its collectives between them"
    if find_kind(manifest.engine).uses_operators and not operator_library.is_built():
        text += (
            ", which is slower: splitc was installed without its C library (install a C compiler, then splitc again, "
            "then compile again)"
        )
    return text
