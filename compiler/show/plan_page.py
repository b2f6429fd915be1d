"""The page of a plan."""

from __future__ import annotations

from collections.abc import Sequence

from splitc.compiler.planning.plan import Plan
from splitc.compiler.sharding.report import sharded_share
from splitc.compiler.show.candidates_chart import candidates_section
from splitc.compiler.show.fused_section import fused_section
from splitc.compiler.show.plan_tables import how_timed
from splitc.compiler.show.plan_verdict import plan_verdict
from splitc.compiler.show.times_section import times_sections
from splitc.runtime.package.mode_words import mode_in_words, words_of
from splitc.runtime.reports.contents import Chapter, Page, Section
from splitc.runtime.reports.memory_chart import memory_section
from splitc.runtime.reports.strips import ShownRank, strip_section
from splitc.runtime.reports.whole_table import whole_section
from splitc.runtime.units import format_bytes

BUDGET = "the budget"


def plan_page(plan: Plan) -> Page:
    """The page of one model's plan."""
    source, count = plan.analysis.graph.source.name, len(plan.ranks)
    mode = mode_in_words(plan.split_mode, count, plan.groups)
    devices = "one device" if count == 1 else f"{count} devices, split by {mode}"
    return Page(
        f"Plan of {source}",
        f"{devices}, {plan.engine} engines",
        [plan_chapter("", plan, plan_verdict(plan))],
        plan.warnings,
    )


def plan_chapter(title: str, plan: Plan, verdict: Sequence[str], why: Sequence[str] = ()) -> Chapter:
    """A chapter on what a model's ranks hold. `why` are notes of a module."""
    ranks = [
        ShownRank(
            str(rank.device),
            [block.name for block in rank.stage.blocks],
            rank.memory.held_weights,
            rank.memory.activations,
            rank.memory.cache,
            rank.memory.total,
            rank.budget,
            adapters=rank.memory.adapters,
        )
        for rank in plan.ranks
    ]
    words = words_of(plan.split_mode)
    labels = [f"{number} {rank.device}" for number, rank in enumerate(ranks)]
    times, find = times_sections(plan) or (None, None)
    sections: list[Section | None] = [
        strip_section(ranks, plan.named_cuts, words.is_radial, plan.groups),
        memory_section(labels, ranks, BUDGET),
        times,
        whole_section(plan.whole_weights, words.whole),
        fused_section(plan.analysis.outcomes),
        candidates_section(plan),
        find,
    ]
    return Chapter(title, _facts(plan), verdict, why, [section for section in sections if section is not None])


def _facts(plan: Plan) -> list[tuple[str, str]]:
    """The key facts of a plan."""
    mode = mode_in_words(plan.split_mode, len(plan.ranks), plan.groups)
    facts = [("split mode", mode), ("engines", plan.engine), ("planned for", plan.objective)]
    facts.append(("times", how_timed(plan)))
    held = sum(weight.bytes for weight in plan.weights)
    if held:
        facts.append(("weights split", f"{sharded_share(plan.weights):.0%} of {format_bytes(held)}"))
    if plan.split.collectives:
        size = format_bytes(sum(plan.split.exchanged(plan.cuts)))
        facts.append((words_of(plan.split_mode).exchanges, f"{plan.split.collectives} a run, {size}"))
    return facts
