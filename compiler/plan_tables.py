"""Plans on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir
from rich.bar import Bar
from rich.markup import escape

from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Factor
from splitc.compiler.sharding.report import why_whole
from splitc.runtime.cli.tables import RANK_SIZES, ROUNDS, block_range, print_cuts, print_whole
from splitc.runtime.cli.terminal import out, print_warning, table
from splitc.runtime.engines.kinds import describe_engine
from splitc.runtime.errors import MisuseError
from splitc.runtime.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from splitc.compiler.planning.plan import Plan


def print_plan(plan: Plan) -> None:
    """Who holds what, against the budgets, and what crosses the cuts."""
    from splitc.compiler.analysis.costs import NOMINAL

    rows = table("rank", "blocks", *RANK_SIZES, "of budget", "", "time", right=(*RANK_SIZES, "", "time"))
    all_seconds = sum(rank.seconds for rank in plan.ranks) or 1.0
    for number, rank in enumerate(plan.ranks):
        memory, budget = rank.memory, max(1, rank.budget or 0)
        rows.add_row(
            f"{number} {rank.device}",
            block_range([block.name for block in rank.stage.blocks]),
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
    each = next(iter(budgets.values())) + " each" * (len(plan.ranks) > 1)
    listed = each if same else ", ".join(f"{device} {budget}" for device, budget in budgets.items())
    speed = "as measured" if plan.profiled else f"estimated for {NOMINAL[plan.ranks[0].device.kind].name}"
    out.print(f"budget: {listed}; time: {speed}")
    if any(rank.device.kind == "cuda" for rank in plan.ranks):
        out.print(f"engines: {describe_engine(plan.engine)}")
    print_cuts([([value.name or "" for value in cut.values], cut.bytes) for cut in plan.cuts], plan.rows is not None)
    if plan.weights:
        _print_split(plan)
    again = [rank.repeated for rank in plan.ranks[1:] if rank.repeated.nodes]
    if again:
        nodes = sum(each.nodes for each in again)
        unsent, weights = (format_bytes(sum(getattr(each, n) for each in again)) for n in ("unsent", "weights"))
        out.print(f"computed again: {nodes} cheap nodes, which spares {unsent} a run and repeats {weights} of weights")
    if plan.choice is not None:
        _print_candidates(plan)
    for warning in plan.warnings:
        print_warning(warning)


def _print_candidates(plan: Plan) -> None:
    """What auto mode compared, and what it chose."""
    numbers = ("a request", "in a stream", "fullest device")
    rows = table("candidate", *numbers, "", right=numbers)
    for each in plan.candidates:
        if each.refused is not None:
            rows.add_row(each.name, "", "", "", f"[dim]{escape(each.refused)}[/]")
            continue
        seconds = map(format_seconds, (each.latency, each.interval))
        rows.add_row(each.name, *seconds, format_bytes(max(each.peaks)), "")
    out.print(rows)
    out.print(f"chosen: {plan.choice}")


NUMBERS = ("size", "weights", "bytes", "sums")
# Axes that reach fewer bytes of weights are not shown.
SHOWN = 4 << 10


def _print_split(plan: Plan) -> None:
    """What of the weights is split, what the ranks bring together, and what of the weights is not split."""
    inside = [weight for weight in plan.weights if weight.in_block]
    shares = []
    for what, weights in (("the blocks", inside), ("all", plan.weights)):
        held, divided = sum(each.bytes for each in weights), sum(each.split for each in weights)
        shares.append(f"{divided / max(1, held):.1%} of {what} ({format_bytes(held)})")
    out.print(f"weights split: {', '.join(shares)}; ", end="")
    if plan.tensor is not None:
        size = sum(map(plan.analysis.costs.value_bytes, plan.tensor.choice.sums.summed))
    else:
        size = sum(cut.bytes for cut in plan.cuts)
    out.print(f"{plan.collectives} {ROUNDS[plan.split_mode]}, {format_bytes(size)} a run")
    whole = [(each.name, each.bytes - each.split, each.reason) for each in plan.weights if each.reason]
    print_whole(whole, plan.split_mode)


def print_axes(plan: Plan) -> None:
    """The axes that reach weights: their size, what they cover, and whether they are split or why not."""
    if plan.tensor is None:
        raise MisuseError("--explain is for --split-mode tensor")
    split, size = plan.tensor, plan.analysis.costs.value_bytes
    reached: dict[Factor, dict[ir.Value, None]] = {}
    for value, axes in split.axis_map.weight_uses():
        for atom in (atom for axis in axes or () for atom in ax.atoms(axis)):
            reached.setdefault(atom, {})[value] = None
    sums = {each.atom: each.sums for each in split.choice.candidates}
    rows = table("size", "weights", "bytes", "sums", "split, or why not", "first of the weights", right=NUMBERS)
    for atom, weights in sorted(reached.items(), key=lambda item: -sum(map(size, item[1]))):
        total = sum(map(size, weights))
        if total < SHOWN:
            continue
        if atom in split.ranges:
            fate = "[green]" + ",".join(str(each.size if each.counts else 0) for each in split.ranges[atom]) + "[/]"
        else:
            fate = escape(why_whole(split, atom) or "")
        first = next(iter(weights)).name or ""
        rows.add_row(
            str(atom.size), str(len(weights)), format_bytes(total), str(sums.get(atom, "")), fate, escape(first)
        )
    out.print(rows)
