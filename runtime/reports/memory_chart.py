"""Each device's memory as a bar against its budget: predicted and measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from splitc.runtime.reports.contents import Chart, Section, Table
from splitc.runtime.reports.strips import ShownRank
from splitc.runtime.reports.theme import BYTES, altair, finished, unit_for
from splitc.runtime.units import format_bytes

ADAPTERS = "requests' adapters"
PREDICTED = {
    "weights": "var(--weights)",
    "caches": "var(--caches)",
    "activations": "var(--activations)",
    ADAPTERS: "var(--adapters)",
    "the engine itself, and loading": "var(--other)",
}
MEASURED = {"loaded, measured": "var(--loaded)", "more at the peak, measured": "var(--peak)"}
# A budget that is more than so many times as large as what is held is cut off there.
SHOWN = 2


def memory_section(labels: Sequence[str], ranks: Sequence[ShownRank], budget: str) -> Section | None:
    """The memory of ranks, or of devices. `budget` says what their budgets are. None if there is nothing to show."""
    largest = max((max(rank.total, rank.measured.peak if rank.measured else 0) for rank in ranks), default=0)
    if not largest:
        return None
    known = [rank.budget for rank in ranks if rank.budget is not None]
    end = min(max([largest, *known]), SHOWN * largest)
    bars = [bar for number, rank in enumerate(ranks) for bar in _bars(number, labels[number], rank)]
    notes = [f"The pale bar is {budget}."] if known else []
    if known and max(known) > end:
        notes = [f"The pale bar is {budget}, which goes on beyond the chart."]
    if any(bar.is_over for bar in bars):
        notes.append("A red line is the budget of a device that needs more.")
    kinds = {kind for bar in bars for kind in bar.parts}
    colours = {kind: colour for kind, colour in (PREDICTED | MEASURED).items() if kind in kinds}
    return Section("Memory", notes, legend=colours, chart=_chart(bars, end, colours), tables=[_table(labels, ranks)])


@dataclass(frozen=True)
class _Bar:
    """A bar: its lines of text, the bytes of its parts, and the budget behind it."""

    number: int
    lines: tuple[str, str]
    parts: Mapping[str, int]
    budget: int | None

    @property
    def is_over(self) -> bool:
        """Whether it is longer than the budget."""
        return self.budget is not None and sum(self.parts.values()) > self.budget

    @property
    def key(self) -> str:
        """Its place in the chart, and its text."""
        return "\n".join((f"{self.number}", *self.lines))


def _bars(number: int, label: str, rank: ShownRank) -> Iterator[_Bar]:
    """A rank's predicted memory, and below it the measured one."""
    sizes = (rank.weights, rank.cache, rank.activations, rank.adapters)
    parts = dict(zip(PREDICTED, (*sizes, max(0, rank.total - sum(sizes))), strict=True))
    if not rank.adapters:
        parts.pop(ADAPTERS)
    full = format_bytes(rank.total)
    if rank.budget is not None:
        share = rank.total / max(1, rank.budget)
        full = f"{'<1%' if share < 0.01 else f'{share:.0%}'} of {format_bytes(rank.budget)}"
    if rank.measured is None:
        yield _Bar(2 * number, (label, full), parts, rank.budget)
        return
    loaded, peak = rank.measured.loaded, rank.measured.peak
    yield _Bar(2 * number, (f"{label}, predicted", full), parts, rank.budget)
    measured = dict(zip(MEASURED, (loaded, max(0, peak - loaded)), strict=True))
    yield _Bar(2 * number + 1, ("measured", format_bytes(peak)), measured, rank.budget)


def _chart(bars: Sequence[_Bar], end: float, colours: Mapping[str, str]) -> Chart:
    alt = altair()
    unit, worth = unit_for(end, BYTES)
    rows = [
        {"bar": bar.key, "kind": kind, "size": size / worth, "order": order, "said": format_bytes(size)}
        for bar in bars
        for order, (kind, size) in enumerate(bar.parts.items())
    ]
    text = alt.Axis(title=None, labelExpr="slice(split(datum.label, '\\n'), 1)", labelLineHeight=14)
    places = alt.Scale(domain=[bar.key for bar in bars], paddingInner=0.3, paddingOuter=0.15)
    y = alt.Y("bar:N", axis=text, scale=places)
    sizes = alt.Scale(domain=[0, end / worth], nice=False)
    shown = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar(clip=True)
        .encode(
            y=y,
            x=alt.X("size:Q", stack=True, title=unit, scale=sizes),
            color=alt.Color("kind:N", scale=alt.Scale(domain=list(colours), range=list(colours.values())), legend=None),
            order="order:Q",
            tooltip=[alt.Tooltip("kind:N"), alt.Tooltip("said:N", title="bytes")],
        )
    )
    limits = [
        {"bar": bar.key, "budget": bar.budget / worth, "said": format_bytes(bar.budget), "over": bar.is_over}
        for bar in bars
        if bar.budget is not None
    ]
    base = alt.Chart(alt.Data(values=limits)).encode(
        y=y, x=alt.X("budget:Q", scale=sizes, title=unit), tooltip=alt.Tooltip("said:N", title="budget")
    )
    track = base.mark_bar(color="var(--track)", clip=True)
    # On top of a bar that is longer.
    limit = base.mark_tick(color="var(--bad)", thickness=3, bandSize=36, clip=True).transform_filter("datum.over")
    layers = [track, shown, limit] if any(row["over"] for row in limits) else [track, shown]
    return finished(alt.layer(*layers) if limits else shown, height=44 * len(bars))


def _table(labels: Sequence[str], ranks: Sequence[ShownRank]) -> Table:
    adapted = any(rank.adapters for rank in ranks)
    columns = ["weights", "caches", "activations", *(["adapters"] if adapted else []), "peak", "budget"]
    measured = any(rank.measured for rank in ranks)
    columns += ["loaded, measured", "peak, measured"] if measured else []
    rows = []
    for label, rank in zip(labels, ranks, strict=True):
        own = [rank.adapters] if adapted else []
        sizes = [rank.weights, rank.cache, rank.activations, *own, rank.total]
        row = [label, *map(format_bytes, sizes), "?" if rank.budget is None else format_bytes(rank.budget)]
        if rank.measured is not None:
            row += [format_bytes(rank.measured.loaded), format_bytes(rank.measured.peak)]
        rows.append(row)
    return Table("Memory in numbers", ["device", *columns], rows, right=columns)
