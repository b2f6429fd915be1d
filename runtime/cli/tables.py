"""Devices, packages and what was measured of them, on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from splitc.runtime.cli.terminal import out, table
from splitc.runtime.devices import DeviceStatus
from splitc.runtime.gpus import INSTALL, find_cupy
from splitc.runtime.machine import Machine
from splitc.runtime.manifest import Build, Built, Manifest, Role
from splitc.runtime.memory_use import RankMemory
from splitc.runtime.tools.bench import BenchResult
from splitc.runtime.tools.compare import Difference
from splitc.runtime.tools.trace import draw_timeline
from splitc.runtime.units import format_bytes, format_seconds, format_shape


def print_devices(found: Sequence[DeviceStatus]) -> None:
    """The devices of a machine, and how GPUs reach each other."""
    rows = table("device", "what", "capability", "memory", "free", "copies", right=("memory", "free"))
    for device in found:
        sizes = map(format_bytes, (device.total_bytes, device.free_bytes))
        copies = ", ".join(f"{other} {how}" for other, how in device.peers.items())
        rows.add_row(device.name, device.description, device.compute_capability or "", *sizes, copies)
    out.print(rows)
    if not find_cupy():
        out.print(f"No GPUs are looked for. {INSTALL}.")


def print_links(machine: Machine) -> None:
    """What was measured between each pair of devices."""
    sizes = [format_bytes(each.bytes) for each in next(iter(machine.measured.values()))]
    rows = table("measured", "", *sizes, right=sizes)
    for name, found in machine.measured.items():
        rows.add_row(name, "copy", *(format_seconds(each.copy) for each in found))
        rows.add_row("", "sum", *(format_seconds(each.reduce) for each in found))
    out.print(rows)


# Outputs that `check` lists one by one, the worst first; a decoder has two for each layer.
LISTED = 12


def differences_table(found: Sequence[Difference]) -> Table:
    """How far each output is off, the worst first."""
    numbers = ("largest error", "relative", "expected", "got")
    rows = table("output", *numbers[:2], "at", *numbers[2:], "", right=numbers)
    worst = sorted(found, key=lambda difference: (difference.passed, -difference.relative))
    listed = [difference for number, difference in enumerate(worst) if number < LISTED or not difference.passed]
    for difference in listed:
        verdict = "[green]agrees[/]" if difference.passed else f"[bold red]differs[/] {difference.problem or ''}"
        errors = (f"{difference.absolute:.2e}", f"{difference.relative:.2e}")
        values = (f"{difference.expected:.6g}", f"{difference.actual:.6g}")
        rows.add_row(difference.name, *errors, ",".join(map(str, difference.where)), *values, verdict)
    if len(found) > len(listed):
        rows.add_row(f"... and {len(found) - len(listed)} more that agree")
    return rows


def print_memory(found: Sequence[RankMemory]) -> None:
    """Each rank's memory, measured beside the prediction."""
    sizes = ("weights", "loaded", "predicted", "peak")
    rows = table("rank", *sizes, right=sizes)
    for number, rank in enumerate(found):
        numbers = (rank.predicted_weights, rank.loaded, rank.predicted_total, rank.peak)
        rows.add_row(f"{number} {rank.device}", *map(format_bytes, numbers))
    out.print(rows)
    out.print("weights and predicted are the plan's; loaded and peak were measured, the engine's own memory included.")


# Who works while one request runs.
AT_WORK = {
    "layer": "one rank works while the others wait",
    "row": "the main rank works, and the others multiply with it",
    "tensor": "all ranks work on it at once",
}


def print_bench(result: BenchResult, split_mode: str) -> None:
    """A package's times, and what its ranks did."""
    numbers = ("latency", "90 %", "rate", "package / unsplit")
    rows = table("", "threads", *numbers, right=numbers)
    own = result.latency
    threads = f"{len(result.ranks)} x {result.threads}"
    rows.add_row("package", threads, format_seconds(own.median), format_seconds(own.p90), f"{result.rate:.1f}/s")
    for other in result.baselines:
        seconds = map(format_seconds, (other.latency.median, other.latency.p90))
        rows.add_row("unsplit", str(other.threads), *seconds, f"{1 / other.latency.median:.1f}/s", f"{other.ratio:.3f}")
    out.print(rows)
    columns = ("busy", "waiting", "overhead", "at work")
    rows = table("rank", *columns, right=columns)
    for number, rank in enumerate(result.ranks):
        times = map(format_seconds, (rank.busy, rank.waiting, rank.overhead))
        rows.add_row(f"{number} {rank.device}", *times, f"{rank.utilization:.0%}")
    out.print(rows)
    if result.in_flight > 1:
        out.print(
            f"{own.runs} runs, {result.in_flight} in flight: {result.against_one:.2f} times the rate of one at a time; "
            "package / unsplit is time a request."
        )
    else:
        out.print(f"Medians of {own.runs} runs, one request at a time: {AT_WORK[split_mode]}.")
    for number, line in enumerate(draw_timeline(len(result.ranks), result.timeline[-4 * result.in_flight :])):
        out.print(f"rank {number} [cyan]{line}[/]")


def print_manifest(manifest: Manifest, routes: Mapping[str, Sequence[str]]) -> None:
    """What a package holds, and how values would get from GPU to GPU here."""
    out.print(
        f"[bold]{manifest.source.name}[/], split by {manifest.split_mode} into {len(manifest.ranks)} ranks "
        f"of {len(manifest.blocks)} blocks, {manifest.engine} engines, {manifest.number_type}"
    )
    if manifest.build is not None:
        out.print(_describe_build(manifest.build))
    rows = table("rank", "blocks", *RANK_SIZES, right=RANK_SIZES)
    for number, rank in enumerate(manifest.ranks):
        sizes = map(format_bytes, (rank.weights_bytes, rank.activation_bytes, rank.cache_bytes))
        rows.add_row(f"{number} {rank.device}", block_range(rank.blocks), *sizes)
    out.print(rows)
    print_cuts([(cut.values, cut.bytes) for cut in manifest.cuts], manifest.split_mode == "row")
    if manifest.collectives:
        out.print(f"{manifest.collectives} {ROUNDS[manifest.split_mode]} a run")
    print_whole([(each.name, each.bytes, each.reason) for each in manifest.unsplit], manifest.split_mode)
    for way, pairs in routes.items():
        out.print(f"between GPUs of this machine: {', '.join(pairs)} {way}")
    out.print()
    rows = table("", "name", "type", "shape", "role")
    kinds = {"input": manifest.inputs, "optional input": manifest.optional, "output": manifest.outputs}
    for kind, tensors in kinds.items():
        for tensor in tensors:
            rows.add_row(kind, tensor.name, tensor.dtype, format_shape(tensor.shape), _describe_role(tensor.role))
    out.print(rows)
    if manifest.states:
        out.print(
            f"{len(manifest.states)} states: " + ", ".join(f"{s.input} -> {s.output}" for s in manifest.states[:4])
        )


def _describe_role(role: Role | None) -> str:
    if role is None:
        return ""
    return f"{role.kind} below {role.rows}" if role.rows else role.kind


def _describe_build(build: Build) -> str:
    if build.built is None:
        return "not built yet: 'splitc build' does that where it will run"
    return f"built with version {describe_built(build.built)}"


def describe_built(built: Built) -> str:
    """The version that engines were built with, and the GPU that they are for."""
    where = f" on {built.gpu} (compute capability {built.compute_capability})" if built.gpu else ""
    return f"{built.version}{where}"


RANK_SIZES = ("weights", "activ.", "cache")
# What brings the ranks of a mode together.
ROUNDS = {"row": "round trips", "tensor": "collectives"}

# Weights left whole that are listed one by one.
WHOLE = 5


def print_whole(weights: Sequence[tuple[str, int, str]], split_mode: str) -> None:
    """The weights that a split mode had to leave whole, the largest with the reason."""
    if not weights:
        return
    total = format_bytes(sum(size for _, size, _ in weights))
    where = "the main device" if split_mode == "row" else "each rank"
    out.print(f"whole on {where}: {total} in {len(weights)} weights, the largest:")
    for name, size, reason in sorted(weights, key=lambda each: -each[1])[:WHOLE]:
        out.print(f"  {escape(name)} {format_bytes(size)}: {escape(reason)}")


def print_cuts(cuts: Sequence[tuple[Sequence[str], int]], from_main: bool) -> None:
    """What crosses each cut: between two ranks that follow each other, or between the main rank and each other one."""
    for number, (names, size) in enumerate(cuts):
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        first = 0 if from_main else number
        out.print(f"cut {first}-{number + 1}: {format_bytes(size)} a run ({listed or 'nothing'})")


def block_range(blocks: list[str]) -> str:
    """Blocks of a rank in few words: `layers.0..layers.5 (6)`."""
    return blocks[0] if len(blocks) == 1 else f"{blocks[0]}..{blocks[-1]} ({len(blocks)})"
