"""Shows plans on the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.bar import Bar
from rich.text import Text

from splitc.compiler.adapters.merged_weights import Merged
from splitc.compiler.analysis.blocks import Placed
from splitc.compiler.engine_graphs.convolutions import convolves
from splitc.compiler.engine_graphs.few_rows import inside_copied
from splitc.compiler.engine_graphs.gpu_sizes import why_not_replayed
from splitc.compiler.fusion.fuse import Outcome
from splitc.compiler.placement.weights import weight_uses
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.resources import Budget
from splitc.compiler.request.request import DISK
from splitc.compiler.sharding.report import AxisSplit, sharded_share
from splitc.compiler.show.fused_section import by_kind, fused_in_words, reasons_not_fused
from splitc.runtime.cli.tables import RANK_SIZES, print_cuts, print_whole, replays_text
from splitc.runtime.cli.terminal import fitted, is_narrow, out, print_warning, table
from splitc.runtime.engines.kinds import ONNXRUNTIME, describe_engine, has_collectives
from splitc.runtime.errors import MisuseError
from splitc.runtime.gpu.replayable import UNLOADED
from splitc.runtime.hardware.machine import known_machine, link_end
from splitc.runtime.package.mode_words import words_of
from splitc.runtime.units import block_range, first_few, format_bytes, format_seconds


def print_plan(plan: Plan) -> None:
    """Print what each rank holds, against its budget, and the values that cross the cuts."""
    named = max((candidate.devices for candidate in plan.alternatives), default=0)
    if len(plan.ranks) < named:
        out.print(f"uses {len(plan.ranks)} of {named} devices, for the reason below; --spread uses all of them")
    _print_sizes(plan)
    if plan.replicas is not None:
        shares = ", ".join(f"{share:.3g}" for share in plan.replicas.shares)
        out.print(f"{plan.groups} groups, each with the whole model; shares of the rows: {shares}")
    out.print(f"budget: {_budgets_in_words(plan)}")
    out.print(f"time: {_times_in_words(plan)}{how_timed(plan)}")
    print_beside([(rank.memory.engines, rank.memory.adapters, rank.memory.in_files) for rank in plan.ranks])
    _print_engines(plan)
    print_cuts(plan.named_cuts, words_of(plan.split_mode).is_radial, len(plan.written.ranks))
    if plan.weights:
        _print_split(plan)
    for placed in plan.analysis.partition.placed:
        out.print(_placed_in_words(plan, placed))
    _print_recomputed(plan)
    for merged in plan.analysis.merged:
        out.print(merged_in_words(merged))
    if plan.analysis.slot_rank is not None:
        _print_slots(plan)
    if plan.analysis.outcomes:
        _print_fused(plan)
    if plan.choice is not None:
        _print_alternatives(plan)
    for warning in plan.warnings:
        print_warning(warning)


def _print_sizes(plan: Plan) -> None:
    """Print a row a rank: its blocks, memory, share of the budget and share of the time."""
    rows = table("rank", "blocks", *RANK_SIZES, "of budget", "", "time", right=(*RANK_SIZES, "", "time"))
    all_seconds = sum(rank.seconds for rank in plan.ranks) or 1.0
    totals = [0, 0, 0]
    for number, rank in enumerate(plan.ranks):
        sizes = rank.memory.weights, rank.memory.activations, rank.memory.cache
        totals = [total + size for total, size in zip(totals, sizes, strict=True)]
        rows.add_row(
            f"{number} {rank.device}",
            block_range([fitted(block.name, out.width // 5) for block in rank.stage.blocks]),
            *map(format_bytes, sizes),
            *budget_cells(rank.memory.total, rank.budget),
            f"{rank.seconds / all_seconds:.0%}",
        )
    rows.add_row("all", "", *map(format_bytes, totals), style="dim")
    out.print(rows)


def _budgets_in_words(plan: Plan) -> str:
    """The devices' budgets: `1.00 GiB each`, or `cpu0 1.00 GiB, cpu1 2.00 GiB`."""
    budgets = {str(rank.device): "unknown" if rank.budget is None else format_bytes(rank.budget) for rank in plan.ranks}
    if len(set(budgets.values())) == 1:
        (budget,) = set(budgets.values())
        return budget + " each" * (len(plan.ranks) > 1 and budget != "unknown")
    return ", ".join(f"{device} {budget}" for device, budget in budgets.items())


def _print_engines(plan: Plan) -> None:
    """Print what GPUs run, whether requests are replayed there, and which CPU devices read weights from files."""
    if any(rank.device.kind == "cuda" for rank in plan.ranks):
        out.print(f"engines: {describe_engine(plan.engine)}")
        if plan.engine == ONNXRUNTIME:
            out.print(replays_text(_why_not_replayed(plan), plan.analysis.states))
    if plan.weights_at == DISK:
        mapped = [str(rank.device) for rank in plan.ranks if rank.device.kind == "cpu"]
        out.print(f"weights on {first_few(mapped)} stay in mapped files, and do not count for the budget")


def _print_recomputed(plan: Plan) -> None:
    """Print what later stages compute again rather than receive, if there is any."""
    works = [rank.rematerialized for rank in plan.written.ranks[1:]]
    if nodes := sum(work.nodes for work in works):
        unsent, weights = (format_bytes(sum(getattr(work, n) for work in works)) for n in ("unsent", "weights"))
        saved = f"saves {unsent} of transfer, duplicates {weights} of weights"
        out.print(f"recomputed per stage: {nodes} cheap nodes ({saved})")


def _placed_in_words(plan: Plan, placed: Placed) -> str:
    """The placed weights and nodes on a device: `placed on cpu1: 24 weights, 4.50 MiB, with 249 nodes`."""
    size = sum(map(plan.analysis.costs.value_bytes, placed.weights))
    nodes = sum(len(block.nodes) for block in placed.blocks)
    where = first_few(_devices_of(plan, placed))
    return f"placed on {where}: {len(placed.weights)} weights, {format_bytes(size)}, with {nodes} nodes"


def _devices_of(plan: Plan, placed: Placed) -> list[str]:
    """The devices of placed weights, one for each group that has the whole model."""
    devices = [str(rank.device) for rank in plan.ranks]
    return devices[devices.index(placed.device) :: len(devices) // plan.groups]


def merged_in_words(merged: Merged) -> str:
    """The effect of an adapter: `adapter style.safetensors, x 0.8: merged into 28 of 32 layers`."""
    scale = "" if merged.strength == 1 else f", x {merged.strength:g}"
    return f"adapter {merged.adapter.name}{scale}: merged into {len(merged.matches.updates)} of {merged.layers} layers"


def _print_slots(plan: Plan) -> None:
    """Print the number of layers that take adapters, and why the others do not."""
    out.print(f"{len(plan.analysis.slots)} layers take adapters (--lora-slots)")
    for why, count in Counter(plan.analysis.slotless.values()).most_common():
        out.print(Text(f"  {count} not: {why}", "dim"))


def _times_in_words(plan: Plan) -> str:
    """The predicted times of requests: `a request 54.7 ms, in a stream one every 60.2 ms; `."""
    if plan.prediction is None:
        return ""
    one, stream = map(format_seconds, (plan.prediction.latency, plan.prediction.interval))
    return f"a request {one}, in a stream one every {stream}; "


def how_timed(plan: Plan) -> str:
    """The source of a plan's times."""
    if plan.profiled:
        return "measured block by block, and activations too"
    speeds = known_machine().speeds
    measured = all(link_end(rank.device) in speeds for rank in plan.ranks)
    return f"estimated by {'measured' if measured else 'typical'} speeds"


def print_beside(held: Sequence[tuple[int, int, int]]) -> None:
    """Print the parts of the budget that are not in the table, and the weights in it that do not count for the budget.

    `held` are the bytes of each rank or device: the engine's own, those for adapters, and those in mapped files.
    """
    engines, adapters, mapped = zip(*held, strict=True)
    if any(engines):
        own = format_bytes(max(engines))
        out.print(f"also counted in 'of budget': up to {own} for the engine itself and as a margin")
    if any(adapters):
        out.print(f"also counted in 'of budget': up to {format_bytes(max(adapters))} for requests with adapters")
    if any(mapped):
        out.print(f"not counted in 'of budget': {format_bytes(sum(mapped))} of weights, read from mapped files")


def budget_cells(total: int, budget: Budget) -> tuple[Bar | str, str]:
    """Bytes as a share of a budget: a bar and a number, for a table."""
    if budget is None:
        return "", "?"
    known = max(1, budget)
    share = f"{total / known:.0%}"
    return (share, "") if is_narrow() else (Bar(size=known, begin=0, end=total, width=9), share)


def _why_not_replayed(plan: Plan) -> str:
    analysis = plan.analysis
    graph = analysis.graph
    if analysis.costs.bound.uncertain.difference(value.name or "" for value in inside_copied(graph.graph)):
        return "sizes depend on data"
    inside = has_collectives(plan.engine, [rank.device for rank in plan.ranks])
    if any(plan.split.more_sessions(rank, inside) for rank in plan.ranks) and any(map(convolves, graph.nodes)):
        return f"the model {UNLOADED}"
    return why_not_replayed(graph.graph, analysis.costs.bound.shapes)


def _print_fused(plan: Plan) -> None:
    """Print the number of attentions, norms and so on that became one operator, and why the others did not."""
    for title, outcomes in by_kind(plan.analysis.outcomes):
        out.print(fused_in_words(title, outcomes))
        for why, count in reasons_not_fused(outcomes):
            out.print(Text(f"  {count} not: {why}", "dim"))


def _print_alternatives(plan: Plan) -> None:
    """Print the candidates that auto mode compared, and the chosen one."""
    numbers = ("a request", "in a stream", "fullest device")
    hosts = any(candidate.placement for candidate in plan.alternatives)
    rows = table("candidate", *numbers, "hosts" if hosts else "", right=numbers)
    refused: dict[str, list[str]] = {}
    for candidate in plan.alternatives:
        if candidate.refused is not None:
            refused.setdefault(candidate.refused, []).append(candidate.name)
            continue
        seconds = map(format_seconds, (candidate.latency, candidate.interval))
        rows.add_row(candidate.name, *seconds, format_bytes(max(candidate.peaks)), candidate.placement)
    out.print(rows)
    for why, names in refused.items():
        out.print(Text(f"not {', '.join(names)}: {why}", "dim"))
    out.print(f"chosen: {plan.choice}")


NUMBERS = ("size", "weights", "bytes", "collectives")
# Axes of fewer bytes of weights are not shown.
SHOWN = 4 << 10


def _print_split(plan: Plan) -> None:
    """Print the share of the weights that is split, the bytes that ranks exchange, and the whole weights."""
    inside = [weight for weight in plan.weights if weight.in_block]
    shares = [
        f"{sharded_share(weights):.1%} of {what} ({format_bytes(sum(weight.bytes for weight in weights))})"
        for what, weights in (("the blocks", inside), ("all", plan.weights))
    ]
    size = format_bytes(sum(plan.split.exchanged(plan.cuts)))
    exchanged = f"{plan.split.collectives} {words_of(plan.split_mode).exchanges}, {size} a run"
    out.print(f"weights split: {', '.join(shares)}; {exchanged}")
    print_whole(plan.whole_weights, plan.split_mode)


def check_explained(plan: Plan) -> None:
    """Raise MisuseError if there is nothing to explain."""
    listed = plan.analysis.outcomes or plan.analysis.partition.placed or plan.analysis.slotless
    if plan.split.axis_splits() is None and not listed:
        raise MisuseError(
            "--explain lists what was fused or placed, layers without slots, and the axes of --split-mode tensor: "
            f"this plan has none of these, and its mode is {plan.split_mode}"
        )


def print_explained(plan: Plan) -> None:
    """Print each attention or norm that was found, layers without slots, placed weights, and axes."""
    if plan.analysis.outcomes:
        _print_places(plan.analysis.outcomes)
    if plan.analysis.slotless:
        rows = table("weight of a layer", "no adapter, since")
        for name, why in plan.analysis.slotless.items():
            rows.add_row(fitted(name, out.width // 2), why)
        out.print(rows)
    if plan.analysis.partition.placed:
        _print_placed(plan)
    axes = plan.split.axis_splits()
    if axes is not None:
        _print_axes(axes)


def _print_places(outcomes: Sequence[Outcome]) -> None:
    """Print for each attention (named by its Softmax) and each norm (by its mean) its operator, or why it has none."""
    rows = table("", "by its node", "fused with, or why not")
    for outcome in outcomes:
        operator = Text(outcome.operator, "green") if outcome.operator is not None else outcome.why or ""
        rows.add_row(outcome.kind, fitted(outcome.place, out.width // 2), operator)
    out.print(rows)


def _print_placed(plan: Plan) -> None:
    """Print each weight that lies on another device than its block, with the nodes that go with it."""
    rows = table("placed weight", "bytes", "on", "read by", right=("bytes",))
    uses = weight_uses(plan.analysis.graph)
    for placed in plan.analysis.partition.placed:
        for weight in placed.weights:
            readers = first_few([node.name or node.op_type for node in uses[weight].readers])
            size = format_bytes(plan.analysis.costs.value_bytes(weight))
            name, readers = (fitted(text, out.width // 3) for text in (weight.name or "", readers))
            rows.add_row(name, size, first_few(_devices_of(plan, placed)), readers)
    out.print(rows)


def _print_axes(axes: Sequence[AxisSplit]) -> None:
    """Print the axes of weights: their size, the bytes that they cover, and how they are sharded, or why not."""
    rows = table("size", "weights", "bytes", "collectives", "split, or why not", "first of the weights", right=NUMBERS)
    for axis in (axis for axis in axes if axis.bytes >= SHOWN):
        units = ",".join(map(str, axis.units)) + ", joined" * axis.joined
        result = Text(units, "green") if axis.units else axis.reason or ""
        sums = "" if axis.sums is None else str(axis.sums)
        first = fitted(axis.first, out.width // 4)
        rows.add_row(str(axis.size), str(axis.weights), format_bytes(axis.bytes), sums, result, first)
    out.print(rows)
