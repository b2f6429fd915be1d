"""The times of requests: a histogram, with that of an earlier bench, and a table with the unsplit model's time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from splitc.runtime.reports.contents import Section, Table
from splitc.runtime.reports.theme import SECONDS, altair, finished, unit_for
from splitc.runtime.reports.times_chart import latencies_table
from splitc.runtime.tools.bench import BenchResult
from splitc.runtime.tools.earlier_bench import EarlierBench
from splitc.runtime.units import format_seconds

# The most bars of the histogram, and the requests for each of them on average.
BARS, FOR_EACH = 30, 4
# The share of the slowest requests that it leaves out if they take so many times as long as the others: one that takes
# a hundred times as long would make one bar of all others.
LEFT_OUT, FAR = 0.01, 1.5
NOW, THEN = "now", "then"
PAINT = {NOW: "var(--busy)", THEN: "var(--sums)"}


def latency_section(result: BenchResult, before: EarlierBench | None) -> Section:
    """The times of requests."""
    series = {NOW: result.seconds} | ({THEN: before.time.seconds} if before is not None else {})
    series = {name: seconds for name, seconds in series.items() if seconds}
    table = latencies_table(result)
    if len(result.seconds) < 2:
        return Section("Latency", tables=[table])
    every = np.concatenate(list(series.values()))
    end, usual = float(every.max()), float(np.quantile(every, 1 - LEFT_OUT))
    notes = ["How many requests took how long. The lines are the median and the 90th percentile."]
    if end > FAR * usual:
        end, slower = usual, int((every > usual).sum())
        notes.append(f"{slower} that took longer, up to {format_seconds(float(every.max()))}, are not drawn.")
    colours = {name: PAINT[name] for name in series} if len(series) > 1 else {}
    return Section("Latency", notes, legend=colours, chart=_chart(result, series, end), tables=[table])


def compared_section(result: BenchResult, before: EarlierBench) -> Section:
    """The two benches side by side."""
    columns = ("then", "now", "now / then")
    notes = [f"Then is {before.name}.", *(f"{what}.".capitalize() for what in before.unlike(result))]
    table = Table("Compared", ("", *columns), before.rows(result), columns, folded=False)
    return Section("Compared with an earlier bench", notes, tables=[table])


def _chart(result: BenchResult, series: dict[str, list[float]], end: float) -> Any:
    alt = altair()
    unit, worth = unit_for(end, SECONDS)
    start = min(min(seconds) for seconds in series.values())
    bars_shown = max(2, min(BARS, len(result.seconds) // FOR_EACH))
    edges = np.linspace(start, max(end, start * 1.001), bars_shown + 1)
    rows = [
        {"from": low / worth, "to": high / worth, "share": count / len(seconds), "count": int(count), "run": name}
        for name, seconds in series.items()
        for low, high, count in zip(edges[:-1], edges[1:], np.histogram(seconds, edges)[0], strict=True)
        if count
    ]
    colour = alt.Color("run:N", scale=alt.Scale(domain=list(PAINT), range=list(PAINT.values())), legend=None)
    times = alt.Scale(domain=[edges[0] / worth, edges[-1] / worth], nice=False, zero=False)
    tips: Sequence[Any] = [alt.Tooltip("count:Q", title="requests"), alt.Tooltip("run:N")]
    bars = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar(opacity=0.6 if len(series) > 1 else 1.0, stroke="var(--card)", strokeWidth=0.5)
        .encode(
            x=alt.X("from:Q", title=unit, scale=times),
            x2="to:Q",
            y=alt.Y("share:Q", title="share of requests", stack=None, axis=alt.Axis(format="%", tickCount=4)),
            y2=alt.Y2(datum=0),
            color=colour,
            tooltip=tips,
        )
    )
    marks = [
        {"at": seconds / worth, "said": f"{what}, {format_seconds(seconds)}"}
        for what, seconds in (("median", result.latency.median), ("90 %", result.latency.p90))
    ]
    lines = (
        alt.Chart(alt.Data(values=marks))
        .mark_rule(color="var(--ink)", strokeDash=[4, 3], clip=True)
        .encode(x=alt.X("at:Q", scale=times), tooltip=alt.Tooltip("said:N"))
    )
    return finished(alt.layer(bars, lines), height=160)
