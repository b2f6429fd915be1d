"""Show plans on the terminal."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich.bar import Bar
from rich.text import Text

from splitc.runtime.cli.tables import RANK_SIZES, print_cuts, print_whole
from splitc.runtime.cli.terminal import fitted, out, print_warning, table
from splitc.runtime.engines.kinds import describe_engine
from splitc.runtime.errors import MisuseError
from splitc.runtime.package.mode_words import words_of
from splitc.runtime.units import block_range, format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitc.compiler.fusion.fuse import Fate
    from splitc.compiler.planning.plan import Plan
    from splitc.compiler.sharding.report import AxisFate


def print_plan(plan: Plan) -> None:
    """Print what each rank holds, against its budget, and what crosses the cuts."""
    rows = table("rank", "blocks", *RANK_SIZES, "of budget", "", "time", right=(*RANK_SIZES, "", "time"))
    all_seconds = sum(rank.seconds for rank in plan.ranks) or 1.0
    for number, rank in enumerate(plan.ranks):
        memory, budget = rank.memory, max(1, rank.budget or 0)
        rows.add_row(
            f"{number} {rank.device}",
            block_range([fitted(block.name, out.width // 5) for block in rank.stage.blocks]),
            *map(format_bytes, (memory.weights, memory.activations, memory.cache)),
            Bar(size=budget, begin=0, end=memory.total, width=9) if rank.budget is not None else "",
            f"{memory.total / budget:.0%}" if rank.budget is not None else "?",
            f"{rank.seconds / all_seconds:.0%}",
        )
    memories = [rank.memory for rank in plan.ranks]
    totals = (sum(m.weights for m in memories), sum(m.activations for m in memories), sum(m.cache for m in memories))
    rows.add_row("all", "", *map(format_bytes, totals), style="dim")
    out.print(rows)
    budgets = {str(rank.device): "unknown" if rank.budget is None else format_bytes(rank.budget) for rank in plan.ranks}
    same = len(set(budgets.values())) == 1
    common = next(iter(budgets.values())) + " each" * (len(plan.ranks) > 1)
    listed = common if same else ", ".join(f"{device} {budget}" for device, budget in budgets.items())
    out.print(f"budget: {listed}; time: {'as measured' if plan.profiled else 'estimated'}")
    if any(rank.device.kind == "cuda" for rank in plan.ranks):
        out.print(f"engines: {describe_engine(plan.engine)}")
    print_cuts([([value.name or "" for value in cut.values], cut.bytes) for cut in plan.cuts], plan.split.is_radial)
    if plan.weights:
        _print_split(plan)
    again = [rank.rematerialized for rank in plan.ranks[1:] if rank.rematerialized.nodes]
    if again:
        nodes = sum(work.nodes for work in again)
        unsent, weights = (format_bytes(sum(getattr(work, n) for work in again)) for n in ("unsent", "weights"))
        saved = f"saves {unsent} of transfer, duplicates {weights} of weights"
        out.print(f"recomputed per stage: {nodes} cheap nodes ({saved})")
    if plan.analysis.fates:
        _print_fused(plan)
    if plan.choice is not None:
        _print_alternatives(plan)
    for warning in plan.warnings:
        print_warning(warning)


def _print_fused(plan: Plan) -> None:
    """Print how many attentions and norms became one operator, and why the others did not."""
    for kind, title in (("attention", "attention"), ("norm", "norms")):
        fates = [fate for fate in plan.analysis.fates if fate.kind == kind]
        if fates:
            out.print(f"{title} fused: {sum(fate.operator is not None for fate in fates)} of {len(fates)}")
        for why, count in Counter(fate.why for fate in fates if fate.why is not None).items():
            out.print(Text(f"  {count} not: {why}", "dim"))


def _print_alternatives(plan: Plan) -> None:
    """Print what auto mode compared, and what it chose."""
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
    """Print how much of the weights is split, what the ranks exchange, and which weights are not split."""
    inside = [weight for weight in plan.weights if weight.in_block]
    shares = []
    for what, weights in (("the blocks", inside), ("all", plan.weights)):
        held, divided = sum(weight.bytes for weight in weights), sum(weight.split for weight in weights)
        shares.append(f"{divided / max(1, held):.1%} of {what} ({format_bytes(held)})")
    size = format_bytes(plan.split.exchanged_bytes(plan.cuts))
    exchanged = f"{plan.split.collectives} {words_of(plan.split_mode).exchanges}, {size} a run"
    out.print(f"weights split: {', '.join(shares)}; {exchanged}")
    whole = [(weight.name, weight.bytes - weight.split, weight.reason) for weight in plan.weights if weight.reason]
    print_whole(whole, plan.split_mode)


def check_explained(plan: Plan) -> None:
    """Raise MisuseError if there is nothing to explain."""
    if plan.split.axis_fates() is None and not plan.analysis.fates:
        raise MisuseError(f"--explain is for --split-mode tensor, and this plan's is {plan.split_mode}")


def print_explained(plan: Plan) -> None:
    """Print each place that looks like attention or a norm, and the axes that were found."""
    if plan.analysis.fates:
        _print_places(plan.analysis.fates)
    axes = plan.split.axis_fates()
    if axes is not None:
        _print_axes(axes)


def _print_places(fates: Sequence[Fate]) -> None:
    """Print for each attention, by its Softmax, and each norm, by its mean, its operator, or why it has none."""
    rows = table("", "by its node", "fused with, or why not")
    for fate in fates:
        operator = Text(fate.operator, "green") if fate.operator is not None else fate.why or ""
        rows.add_row(fate.kind, fitted(fate.place, out.width // 2), operator)
    out.print(rows)


def _print_axes(fates: Sequence[AxisFate]) -> None:
    """Print the axes of weights: their size, the bytes that they cover, and how they are sharded or why not."""
    rows = table("size", "weights", "bytes", "collectives", "split, or why not", "first of the weights", right=NUMBERS)
    for axis in (axis for axis in fates if axis.bytes >= SHOWN):
        units = ",".join(map(str, axis.units)) + ", joined" * axis.joined
        fate = Text(units, "green") if axis.units else axis.reason or ""
        sums = "" if axis.sums is None else str(axis.sums)
        first = fitted(axis.first, out.width // 4)
        rows.add_row(str(axis.size), str(axis.weights), format_bytes(axis.bytes), sums, fate, first)
    out.print(rows)
