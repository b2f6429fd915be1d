"""Changes that a plan suggests, and what they would gain, from its own numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from splitc.compiler.analysis.blocks import PLACED
from splitc.compiler.planning.plan import Plan
from splitc.compiler.show.candidates_chart import is_chosen, seconds_for
from splitc.compiler.show.plan_tables import how_timed
from splitc.runtime.package.mode_words import words_of
from splitc.runtime.units import format_bytes, format_seconds

# The least gain that is worth a sentence: times are predicted no better than that.
WORTH = 0.1
# A device with a larger share of its budget in use has little room for longer inputs than planned for.
FULL = 0.9


def plan_verdict(plan: Plan) -> list[str]:
    """Sentences about a plan, most important first."""
    held = [(str(rank.device), rank.memory.total, rank.budget) for rank in plan.ranks]
    return [*room_verdict(held), *split_verdict(plan), *estimates_verdict([plan])]


def split_verdict(plan: Plan) -> list[str]:
    """Sentences about the split of one model, which may be a module of several."""
    return [*_stages(plan), *_others(plan), *_whole(plan)]


def room_verdict(held: Iterable[tuple[str, int, int | None]]) -> Iterator[str]:
    """A sentence about the fullest device. `held` has each device's name, the bytes that it holds, and its budget."""
    known = [(total / budget, budget - total, device) for device, total, budget in held if budget]
    if not known:
        return
    share, left, device = max(known)
    if left < 0:
        yield f"{device} lacks {format_bytes(-left)}: add a device, raise the budget, or plan for shorter --shapes."
    elif share > FULL:
        yield (
            f"{device} is {share:.0%} full, and has {format_bytes(left)} left: longer inputs than planned for may "
            "not run. More devices, or --weights-at disk, make room."
        )
    else:
        yield f"{device} is the fullest device, {share:.0%} of its budget, and has {format_bytes(left)} left."


def _stages(plan: Plan) -> Iterator[str]:
    """A sentence about the slowest stage, which sets the pace of a stream."""
    ranks = [rank for rank in plan.written.ranks if any(block.kind != PLACED for block in rank.stage.blocks)]
    groups = {rank.group: max(own.seconds for own in ranks if own.group == rank.group) for rank in ranks}
    if len(groups) < 2 or words_of(plan.split_mode).is_radial or not sum(groups.values()):
        return
    slowest, mean = max(groups.values()), sum(groups.values()) / len(groups)
    rank = next(rank for rank in ranks if groups[rank.group] == slowest)
    gain = slowest / mean - 1
    if gain < WORTH:
        yield f"Stages take equal times, to {gain:.0%}: moving blocks gains little."
        return
    yield (
        f"Rank {plan.ranks.index(rank)} ({rank.device}) takes {format_seconds(slowest)} of a request, the mean stage "
        f"{format_seconds(mean)}: stages of equal time would give up to {gain:.0%} more requests a second. Move blocks "
        "in plan.json, as far as budgets and single blocks allow."
    )


def _others(plan: Plan) -> Iterator[str]:
    """Sentences about candidates of auto mode that would be better for another objective."""
    possible = [candidate for candidate in plan.alternatives if candidate.refused is None]
    chosen = next((candidate for candidate in possible if is_chosen(plan, candidate)), None)
    if chosen is None:
        if plan.choice is None and len(plan.ranks) > 1:
            yield "Only this mode was planned: without --split-mode all are compared."
        return
    said = False
    other, what = ("throughput", "in a stream") if plan.objective == "latency" else ("latency", "for a request")
    faster = min(possible, key=partial(seconds_for, other))
    least, own = seconds_for(other, faster), seconds_for(other, chosen)
    if least * (1 + WORTH) < own:
        said = True
        yield (
            f"{faster.name} would take {format_seconds(least)} {what} rather than {format_seconds(own)}: "
            f"--objective {other}."
        )
    smaller = min(possible, key=lambda candidate: max(candidate.peaks))
    if max(smaller.peaks) * (1 + WORTH) < max(chosen.peaks):
        said = True
        yield (
            f"{smaller.name} would need {format_bytes(max(smaller.peaks))} on the fullest device rather than "
            f"{format_bytes(max(chosen.peaks))}: --split-mode {smaller.mode}."
        )
    if not said and len(possible) > 1:
        yield f"Nothing else of the {len(possible)} that were compared is better by {WORTH:.0%} in time or memory."


def _whole(plan: Plan) -> Iterator[str]:
    """A sentence about weights that are not split, although that would save memory."""
    held = sum(weight.bytes for weight in plan.weights)
    size = sum(own for _, own, _ in plan.whole_weights)
    if len(plan.ranks) < 2 or not held or size < WORTH * held:
        return
    why: dict[str, int] = {}
    for _, own, reason in plan.whole_weights:
        why[reason] = why.get(reason, 0) + own
    reason, most = max(why.items(), key=lambda item: item[1])
    saved = size - size // len(plan.ranks)
    yield (
        f"{format_bytes(size)} of {format_bytes(held)} of weights are whole on {words_of(plan.split_mode).whole}. "
        f"Split, they would save up to {format_bytes(saved)} a device. Of {format_bytes(most)} the reason is: {reason}."
    )


def estimates_verdict(plans: Iterable[Plan]) -> Iterator[str]:
    """A sentence about how to get better predictions of times."""
    if any("typical" in how_timed(plan) for plan in plans):
        yield (
            "Times are predicted by typical speeds. 'splitc devices --measure' measures this machine's once, --profile "
            "this model's blocks."
        )
