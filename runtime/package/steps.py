"""The steps of a rank's program, as they are in the manifest."""

from __future__ import annotations

from msgspec import Struct


class Receive(Struct, frozen=True, tag="receive"):
    """Receive `value` from the rank `source`."""

    value: str
    source: int


class Run(Struct, frozen=True, tag="run"):
    """Run the rank's engine of this number on its inputs, and keep its outputs."""

    engine: int


class Send(Struct, frozen=True, tag="send"):
    """Send `value` to the rank `target`."""

    value: str
    target: int


class Reduce(Struct, frozen=True, tag="reduce"):
    """All-reduce the values `parts` over the ranks `ranks`. All of them get the results, named `wholes`.

    `operation` is `sum` or `max`, element by element.
    """

    operation: str
    parts: list[str]
    wholes: list[str]
    ranks: list[int]


Step = Receive | Run | Send | Reduce
