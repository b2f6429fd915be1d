"""The times of requests, beside an earlier bench's and the unsplit model's, and each rank's time per request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from splitc.runtime.reports.contents import Section, Table
from splitc.runtime.reports.theme import SECONDS, altair, finished, unit_for
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
# A rank's time, in the order of `RankTimes.seconds`.
PARTS = {"busy": "var(--busy)", "waiting": "var(--track)", "overhead": "var(--sends)"}


def latency_section(result: BenchResult, before: EarlierBench | None) -> Section:
    """The times of requests."""
    series = {NOW: result.seconds} | ({THEN: before.seconds} if before is not None else {})
    series = {name: seconds for name, seconds in series.items() if seconds}
    numbers, rows = result.request_rows()
    table = Table("Time of a request", ("", "threads", *numbers), rows, numbers, folded=False)
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


def times_section(result: BenchResult, at_work: str, caveats: Sequence[str]) -> Section:
    """The medians of all runs. `at_work` says which ranks work on one request, `caveats` what the times include."""
    alt = altair()
    labels = [f"{number} {rank.device}" for number, rank in enumerate(result.ranks)]
    times = [rank.seconds for rank in result.ranks]
    unit, worth = unit_for(max(map(sum, times), default=0.0), SECONDS)
    rows = [
        {"rank": label, "kind": kind, "order": number, "time": seconds / worth, "said": format_seconds(seconds)}
        for label, seconds_by_kind in zip(labels, times, strict=True)
        for number, (kind, seconds) in enumerate(zip(PARTS, seconds_by_kind, strict=True))
    ]
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar()
        .encode(
            y=alt.Y("rank:N", sort=labels, title=None, scale=alt.Scale(paddingInner=0.3)),
            x=alt.X("time:Q", stack=True, title=unit),
            color=alt.Color("kind:N", scale=alt.Scale(domain=list(PARTS), range=list(PARTS.values())), legend=None),
            order="order:Q",
            tooltip=[alt.Tooltip("rank:N"), alt.Tooltip("kind:N"), alt.Tooltip("said:N", title="for")],
        )
    )
    alone = result.in_flight == 1
    count = f"one request at a time: {at_work}" if alone else f"{result.in_flight} requests in flight"
    numbers, lines = result.rank_rows()
    return Section(
        "Time of each rank",
        [f"Medians of {result.latency.runs} runs, {count}.", *caveats],
        legend=PARTS,
        chart=finished(chart, height=30 * len(labels)),
        tables=[Table("Times in numbers", ("rank", *numbers), lines, numbers)],
    )
