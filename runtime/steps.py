"""A rank's program as the package has it: a list of steps."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class Receive(Struct, frozen=True, tag="receive"):
    """Take `value` from the rank `source`."""

    value: str
    source: int


class Run(Struct, frozen=True, tag="run"):
    """Run the rank's engine of this number on the values that it names, and keep what it returns."""

    engine: int


class Send(Struct, frozen=True, tag="send"):
    """Give `value` to the rank `target`."""

    value: str
    target: int


class Reduce(Struct, frozen=True, tag="reduce"):
    """Bring together what the ranks `ranks` each have under the names `parts`; all get the results, named `wholes`.

    `operation` is `sum`, or `max` for the greatest, element by element.
    """

    operation: str
    parts: list[str]
    wholes: list[str]
    ranks: list[int]


Step = Receive | Run | Send | Reduce


def overlap(programs: Sequence[Sequence[Step]]) -> bool:
    """Whether a request can begin while the one before is further on: a rank that needs nothing of another one."""
    needs: list[set[int]] = []
    for program in programs:
        sources = {step.source for step in program if isinstance(step, Receive)}
        needs.append(sources.union(*(step.ranks for step in program if isinstance(step, Reduce))))
    for _ in programs:
        needs = [own.union(*(needs[rank] for rank in own)) for own in needs]
    return any(set(range(len(programs))) - {rank} - own for rank, own in enumerate(needs))
