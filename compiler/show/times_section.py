"""A plan's predicted time by rank, by block, by operator and by node; and a search for single nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitc.compiler.analysis.costs import nominal_speed
from splitc.compiler.nodes import name_of, operator_name
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.rank_plan import RankPlan
from splitc.runtime.reports.contents import Chart, Section, Table
from splitc.runtime.reports.strips import colour_of
from splitc.runtime.reports.theme import SECONDS, altair, finished, unit_for
from splitc.runtime.units import format_bytes, format_seconds

# The most rows of a table that show at once, and the most nodes that can be searched for: their names add half a
# megabyte to a page.
FEW, MOST_NODES = 6, 5000
# The block of nodes that several stages compute, each for itself.
EVERYWHERE = "rematerialized"


def times_sections(plan: Plan) -> tuple[Section, Section] | None:
    """The predicted times, and the search; None if the predicted time is zero."""
    costs = find_costs(plan)
    whole = sum(cost.seconds for cost in costs)
    if not whole:
        return None
    columns = ("time", "share", "weights", "makes")
    by_block, by_operator = _summed(costs, "block"), _summed(costs, "operator", counted=True)
    blocks = _table("Slowest blocks", ("block", *columns), by_block, whole)
    operators = _table("Slowest operators", ("operator", "nodes", *columns), by_operator, whole)
    notes = ["Predicted for a request. Blocks and operators share a rank's time by their operations and bytes."]
    times = Section("Time of each rank", notes, chart=_chart(plan), tables=[*blocks, *operators])
    return times, _search(costs)


def _summed(costs: Sequence[NodeCost], by: str, counted: bool = False) -> list[tuple[list[str], float, int, int]]:
    """Sums over the nodes of a block or an operator: names, seconds, bytes of weights and of outputs, slowest first."""
    alike: dict[str, list[NodeCost]] = {}
    for cost in costs:
        alike.setdefault(getattr(cost, by), []).append(cost)
    sums = [
        (
            [name, *([str(len(own))] if counted else [])],
            sum(cost.seconds for cost in own),
            sum(cost.weights for cost in own),
            sum(cost.made for cost in own),
        )
        for name, own in alike.items()
    ]
    return sorted(sums, key=lambda row: -row[1])


def _table(
    title: str, columns: Sequence[str], sums: Sequence[tuple[list[str], float, int, int]], whole: float
) -> list[Table]:
    """The first rows, and a second table of all rows if there are more."""
    rows = [
        (*names, format_seconds(seconds), f"{seconds / whole:.0%}", format_bytes(weights), format_bytes(made))
        for names, seconds, weights, made in sums
    ]
    shown = Table(title, columns, rows[:FEW], columns[1:], folded=False)
    return [shown, *([Table(f"All {len(rows)}", columns, rows, columns[1:])] if len(rows) > FEW else [])]


def _chart(plan: Plan) -> Chart:
    alt = altair()
    unit, worth = unit_for(max(rank.seconds for rank in plan.ranks), SECONDS)
    labels = [f"{number} {rank.device}" for number, rank in enumerate(plan.ranks)]
    rows = [
        {"rank": label, "time": rank.seconds / worth, "said": format_seconds(rank.seconds)}
        for label, rank in zip(labels, plan.ranks, strict=True)
    ]
    base = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y("rank:N", sort=labels, title=None, scale=alt.Scale(paddingInner=0.3)), x=alt.X("time:Q", title=unit)
    )
    paint = alt.Scale(domain=labels, range=[f"var(--d{colour_of(str(rank.device))})" for rank in plan.ranks])
    bars = base.mark_bar().encode(
        color=alt.Color("rank:N", scale=paint, legend=None),
        tooltip=[alt.Tooltip("rank:N"), alt.Tooltip("said:N", title="for")],
    )
    return finished(bars, height=30 * len(labels))


def _search(costs: Sequence[NodeCost]) -> Section:
    """A box to search for a node by name, and to see where it runs."""
    listed = sorted(costs, key=lambda cost: -cost.seconds)[:MOST_NODES]
    rows = [
        (
            cost.name,
            cost.operator,
            cost.block,
            cost.ranks,
            format_seconds(cost.seconds),
            format_bytes(cost.weights),
            format_bytes(cost.made),
        )
        for cost in listed
    ]
    numbers = ("time", "weights", "makes")
    search = Table("a node, an operator or a block", ("node", "operator", "block", "rank", *numbers), rows, numbers)
    notes = (
        [] if len(listed) == len(costs) else [f"The {len(listed)} slowest of {len(costs)} nodes, the slowest first."]
    )
    return Section("Find a node", notes, search=search)


@dataclass(frozen=True)
class NodeCost:
    """A node of the model, its block, the ranks that run it, and its cost on them.

    - `weights`: the bytes of weights that it reads, before they are split.
    - `made`: the bytes of its outputs, before they are split.
    """

    name: str
    operator: str
    block: str
    ranks: str
    seconds: float
    weights: int
    made: int


def find_costs(plan: Plan) -> list[NodeCost]:
    """The nodes of all stages in order. A rank's predicted time is divided among its nodes by operations and bytes."""
    ranks = plan.written.ranks
    groups = [[rank for rank in ranks if rank.group == group] for group in sorted({rank.group for rank in ranks})]
    return [cost for members in groups for cost in _costs_of(plan, members)]


def _costs_of(plan: Plan, members: Sequence[RankPlan]) -> list[NodeCost]:
    """The nodes of a stage. Nodes that its ranks share take as long as on the slowest rank."""
    costs, stage = plan.analysis.costs, members[0].stage
    speed = nominal_speed(members[0].device.kind)
    blocks = {node: block.name for block in stage.blocks for node in block.nodes}
    numbers = [plan.written.ranks.index(rank) for rank in members]
    named = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
    running = [node for node in stage.nodes if node not in costs.graph.folded]
    shares = [costs.seconds(node, speed) for node in running]
    worth = max(rank.seconds for rank in members) / (sum(shares) or 1.0)
    return [
        NodeCost(
            name_of(node),
            operator_name(node),
            blocks.get(node, EVERYWHERE),
            named,
            share * worth,
            costs.weight_bytes([node]),
            sum(map(costs.value_bytes, node.outputs)),
        )
        for node, share in zip(running, shares, strict=True)
    ]
