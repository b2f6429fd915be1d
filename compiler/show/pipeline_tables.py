"""Shows the plan of a folder on the terminal: one section per module, and the sum for each device."""

from __future__ import annotations

from rich.table import Table

from splitc.compiler.pipelines.ledger import can_swap
from splitc.compiler.pipelines.plan import PipelinePlan
from splitc.compiler.planning.resources import Budget
from splitc.compiler.show.fused_section import by_kind, fused_in_words
from splitc.compiler.show.plan_tables import budget_cells, print_beside
from splitc.runtime.cli.tables import RANK_SIZES, module_title
from splitc.runtime.cli.terminal import fitted, out, print_warning, table
from splitc.runtime.units import block_range, first_few, format_bytes


def print_pipeline(plan: PipelinePlan) -> None:
    """Print what each module holds on each device, the sums against the budgets, and the files that are left out."""
    rows = table("module", "device", "blocks", *RANK_SIZES, "of budget", "", right=RANK_SIZES)
    for module in plan.modules:
        for number, rank in enumerate(module.plan.ranks):
            memory = rank.memory
            one = module.plan
            title = "" if number else module_title(module.name, one.split_mode, len(one.ranks), one.groups)
            sizes = (memory.weights, memory.activations, memory.cache)
            blocks = block_range([fitted(block.name, out.width // 5) for block in rank.stage.blocks])
            _add(rows, [title, str(rank.device), blocks], sizes, memory.total, plan.budgets.get(str(rank.device)))
        rows.add_section()
    for number, device in enumerate(plan.devices):
        title = "" if number else "all together"
        sizes = (device.weights, device.activations, device.cache)
        _add(rows, [title, device.device, ""], sizes, device.total, device.budget)
    out.print(rows)
    print_beside([(device.engines, device.adapters, device.mapped) for device in plan.devices])
    for device in plan.devices:
        if device.common:
            out.print(f"{device.device}: {format_bytes(device.common)} of weights are held once, for several modules")
    if plan.swap:
        out.print("modules work in turn: each device has room for the swapped weights of the largest module")
        for module in plan.modules:
            if stay := [str(rank.device) for rank in module.plan.ranks if not can_swap(module.plan, rank)]:
                out.print(f"{module.name}: its weights stay on {first_few(stay)}, since its engines contain them")
    for module in plan.modules:
        out.print(f"{module.name}: {module.why}")
        for title, outcomes in by_kind(module.plan.analysis.outcomes):
            out.print(f"{module.name}: {fused_in_words(title, outcomes)}")
    if plan.folder.files:
        out.print(f"beside them: {first_few([path.as_posix() for path in plan.folder.files])}")
    for left in plan.folder.left_out:
        out.print(f"left out: {left.path}, {format_bytes(left.bytes)}: {left.why}")
    warned: dict[str, list[str]] = {}
    for module in plan.modules:
        for warning in module.plan.warnings:
            warned.setdefault(warning, []).append(module.name)
    for warning, names in warned.items():
        print_warning(f"{', '.join(names)}: {warning}")


def _add(rows: Table, words: list[str], sizes: tuple[int, int, int], total: int, budget: Budget) -> None:
    """Add a row to the table, with its total as a share of the device's budget."""
    rows.add_row(*words, *map(format_bytes, sizes), *budget_cells(total, budget))
