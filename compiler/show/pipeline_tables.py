"""Shows the plan of a folder on the terminal: one section per module, and the sum for each device."""

from __future__ import annotations

from rich.table import Table

from splitc.compiler.pipelines.plan import PipelinePlan, can_swap
from splitc.compiler.planning.resources import Budget
from splitc.compiler.show.fused_section import by_kind, fused_in_words
from splitc.compiler.show.plan_tables import budget_cells, print_beside
from splitc.runtime.cli.tables import RANK_SIZES, module_title
from splitc.runtime.cli.terminal import fitted, out, print_warning, table
from splitc.runtime.units import block_range, first_few, format_bytes


def print_pipeline(plan: PipelinePlan) -> None:
    """Print what each module holds on each device, the sums against the budgets, and the files that are left out."""
    out.print(_memory_table(plan))
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
        out.print(f"copied too: {first_few([path.as_posix() for path in plan.folder.files])}")
    for left in plan.folder.left_out:
        out.print(f"left out: {left.path}, {format_bytes(left.bytes)}: {left.why}")
    warned: dict[str, list[str]] = {}
    for module in plan.modules:
        for warning in module.plan.warnings:
            warned.setdefault(warning, []).append(module.name)
    for warning, names in warned.items():
        print_warning(f"{', '.join(names)}: {warning}")


def _memory_table(plan: PipelinePlan) -> Table:
    """A section per module, with a row for each rank, and one with the sum for each device."""
    rows = table("module", "device", "blocks", *RANK_SIZES, "of budget", "", right=RANK_SIZES)
    for name, one in ((module.name, module.plan) for module in plan.modules):
        title = module_title(name, one.split_mode, len(one.ranks), one.groups)
        for rank in one.ranks:
            memory, device = rank.memory, str(rank.device)
            sizes = (memory.weights, memory.activations, memory.cache)
            blocks = block_range([fitted(block.name, out.width // 5) for block in rank.stage.blocks])
            _add(rows, [title, device, blocks], sizes, memory.total, plan.budgets.get(device))
            title = ""
        rows.add_section()
    title = "all together"
    for held in plan.devices:
        sizes = (held.weights, held.activations, held.cache)
        _add(rows, [title, held.device, ""], sizes, held.total, held.budget)
        title = ""
    return rows


def _add(rows: Table, words: list[str], sizes: tuple[int, int, int], total: int, budget: Budget) -> None:
    """Add a row to the table, with its total as a share of the device's budget."""
    rows.add_row(*words, *map(format_bytes, sizes), *budget_cells(total, budget))
