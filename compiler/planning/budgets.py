"""What devices offer a plan: budgets, shares, and the time of blocks on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from splitc.compiler.analysis.costs import NOMINAL
from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.planning.plan import Request
from splitc.runtime.devices import Device, free_bytes, memory_of
from splitc.runtime.errors import MisuseError
from splitc.runtime.units import parse_bytes

# Bytes that a rank may use; None where that is not known, since its GPU is not in this machine.
Budget = int | None


def find_budgets(devices: Sequence[Device], memory: Sequence[str], headroom: int) -> list[Budget]:
    """Bytes that each rank may use. A later entry of `memory` overrides an earlier one. Raises MisuseError.

    The headroom is left free once in each memory, whatever the number of ranks that share it.
    """
    sharers = Counter(map(memory_of, devices))
    budgets = [
        None if free is None else max(0, free - headroom // sharers[memory_of(device)])
        for device, free in zip(devices, free_bytes(devices))
    ]
    names = [str(device) for device in devices]
    for text in memory:
        name, _, amount = text.rpartition("=")
        if name and name not in names:
            raise MisuseError(f"--memory names '{name}', and the devices are {', '.join(names)}")
        size = parse_bytes(amount)
        budgets = [size if not name or name == other else budget for other, budget in zip(names, budgets)]
    return budgets


def as_shares(budgets: Sequence[Budget]) -> list[float]:
    """The devices' shares as their budgets have it: equal ones unless all are known."""
    known = [budget for budget in budgets if budget is not None]
    return [float(max(1, budget)) for budget in known] if len(known) == len(budgets) else [1.0] * len(budgets)


def check_shares(tensor_split: Sequence[float] | None, count: int) -> None:
    """Raise MisuseError unless there is one share above 0 for each device, or none at all."""
    if tensor_split is None:
        return
    if len(tensor_split) != count:
        raise MisuseError(f"--tensor-split has {len(tensor_split)} shares, and there are {count} devices")
    if min(tensor_split) <= 0:
        raise MisuseError("--tensor-split takes shares above 0: leave a device out with -d to give it nothing")


def block_seconds(analysis: Analysis, devices: Sequence[Device], request: Request) -> list[float]:
    """The time of each block, measured where the request says so."""
    if request.profile:
        from splitc.compiler.packaging.profiling import measure_blocks

        return measure_blocks(analysis, devices, request.threads)
    speed = NOMINAL[devices[0].kind]
    return [sum(analysis.costs.seconds(node, speed) for node in block.nodes) for block in analysis.partition.blocks]
