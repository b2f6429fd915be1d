"""Each rank's time in engines, waiting, and in the runtime's own work, per request."""

from __future__ import annotations

from collections.abc import Sequence

from splitc.runtime.reports.contents import Section, Table
from splitc.runtime.reports.theme import SECONDS, altair, finished, unit_for
from splitc.runtime.tools.bench import BenchResult, Latency
from splitc.runtime.units import format_seconds

PAINT = {"busy": "var(--busy)", "waiting": "var(--track)", "overhead": "var(--sends)"}


def times_section(result: BenchResult, at_work: str, caveats: Sequence[str]) -> Section:
    """The medians of all runs. `at_work` says which ranks work on one request, `caveats` what the times include."""
    alt = altair()
    labels = [f"{number} {rank.device}" for number, rank in enumerate(result.ranks)]
    times = [(rank.busy, rank.waiting, rank.overhead) for rank in result.ranks]
    unit, worth = unit_for(max(map(sum, times), default=0.0), SECONDS)
    rows = [
        {"rank": label, "kind": kind, "order": number, "time": seconds / worth, "said": format_seconds(seconds)}
        for label, seconds_by_kind in zip(labels, times, strict=True)
        for number, (kind, seconds) in enumerate(zip(PAINT, seconds_by_kind, strict=True))
    ]
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar()
        .encode(
            y=alt.Y("rank:N", sort=labels, title=None, scale=alt.Scale(paddingInner=0.3)),
            x=alt.X("time:Q", stack=True, title=unit),
            color=alt.Color("kind:N", scale=alt.Scale(domain=list(PAINT), range=list(PAINT.values())), legend=None),
            order="order:Q",
            tooltip=[alt.Tooltip("rank:N"), alt.Tooltip("kind:N"), alt.Tooltip("said:N", title="for")],
        )
    )
    alone = result.in_flight == 1
    count = f"one request at a time: {at_work}" if alone else f"{result.in_flight} requests in flight"
    columns = ("busy", "waiting", "overhead", "at work")
    table = [
        (label, *map(format_seconds, rank_times), f"{rank.utilization:.0%}")
        for label, rank_times, rank in zip(labels, times, result.ranks, strict=True)
    ]
    return Section(
        "Time of each rank",
        [f"Medians of {result.latency.runs} runs, {count}.", *caveats],
        legend=PAINT,
        chart=finished(chart, height=30 * len(labels)),
        tables=[Table("Times in numbers", ("rank", *columns), table, columns)],
    )


def latencies_table(result: BenchResult) -> Table:
    """The package's time of a request, beside the unsplit model's."""
    ratio = ("package / unsplit",) if result.baselines else ()
    columns = ("latency", "90 %", "rate", *ratio)
    threads = f"{len(result.ranks)} x {result.threads}"
    package = ("package", threads, *_times(result.latency), f"{result.rate:.1f}/s", *("" for _ in ratio))
    others = [
        (
            "unsplit",
            str(other.threads),
            *_times(other.latency),
            f"{1 / other.latency.median:.1f}/s",
            f"{other.ratio:.3f}",
        )
        for other in result.baselines
    ]
    return Table("Time of a request", ("", "threads", *columns), [package, *others], columns, folded=False)


def _times(latency: Latency) -> Sequence[str]:
    return format_seconds(latency.median), format_seconds(latency.p90)
