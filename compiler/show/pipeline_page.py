"""The page of a folder's plan: the sums of all modules first, then one chapter per module."""

from __future__ import annotations

from splitc.compiler.pipelines.plan import PipelinePlan
from splitc.compiler.show.plan_page import BUDGET, plan_chapter
from splitc.compiler.show.plan_verdict import estimates_verdict, room_verdict, split_verdict
from splitc.runtime.reports.contents import Chapter, Page
from splitc.runtime.reports.memory_chart import memory_section
from splitc.runtime.reports.strips import ShownRank
from splitc.runtime.tools.module_sums import IN_TURN
from splitc.runtime.units import format_bytes


def pipeline_page(plan: PipelinePlan) -> Page:
    """The page of a folder's plan."""
    sums = plan.devices
    ranks = [
        ShownRank(
            held.device,
            (),
            held.weights - held.mapped,
            held.activations,
            held.cache,
            held.total,
            held.budget,
            adapters=held.adapters,
        )
        for held in sums
    ]
    memory = memory_section([held.device for held in sums], ranks, BUDGET)
    verdict = [
        *room_verdict((held.device, held.total, held.budget) for held in sums),
        *estimates_verdict(module.plan for module in plan.modules),
    ]
    notes = [IN_TURN] if plan.swap else []
    notes += [f"{left.path}, {format_bytes(left.bytes)}, is left out: {left.why}" for left in plan.folder.left_out]
    if plan.folder.files:
        notes.append(f"Beside the modules: {', '.join(path.as_posix() for path in plan.folder.files)}")
    together = Chapter("All modules", (), verdict, notes, [] if memory is None else [memory])
    chapters = [
        together,
        *(plan_chapter(module.name, module.plan, split_verdict(module.plan), [module.why]) for module in plan.modules),
    ]
    names = [module.name for module in plan.modules]
    warnings = dict.fromkeys(warning for module in plan.modules for warning in module.plan.warnings)
    subtitle = f"{len(names)} modules: {', '.join(names)}"
    return Page(f"Plan of {plan.folder.path.name}", subtitle, chapters, list(warnings))
