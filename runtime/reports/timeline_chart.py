"""Timelines of the ranks' steps, for one request and for a stream of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from splitc.runtime.package.manifest import Rank
from splitc.runtime.package.steps import Receive, Reduce, Send
from splitc.runtime.ranks.loop import Replay
from splitc.runtime.ranks.request import Execution
from splitc.runtime.reports.contents import Section
from splitc.runtime.reports.strips import COLOURS
from splitc.runtime.reports.theme import SECONDS, altair, finished, unit_for
from splitc.runtime.tools.trace import Timeline, describe, is_launch
from splitc.runtime.units import format_seconds

COMPUTES, LAUNCHES, FINISHES, REPLAYS = "computes", "launches a GPU's work", "waits for its GPU", "replays a CUDA graph"
KINDS = {Receive: "waits for a value", Reduce: "sums with other ranks", Send: "sends", Replay: REPLAYS}
PAINT = {
    COMPUTES: "var(--busy)",
    LAUNCHES: "var(--busy)",
    FINISHES: "var(--peak)",
    REPLAYS: "var(--loaded)",
    "waits for a value": "var(--track)",
    "sums with other ranks": "var(--sums)",
    "sends": "var(--sends)",
}
# What is drawn of a stream.
AT_WORK = (COMPUTES, LAUNCHES, REPLAYS)
# The most bars that are drawn: of more, neighbouring ones are joined.
MOST = 3000

Bar = dict[str, Any]


def timeline_sections(ranks: Sequence[Rank], request: Timeline, stream: Timeline) -> list[Section]:
    """One request by the kind of its steps, and a stream of them by request."""
    alone, several = _bars(ranks, request), _bars(ranks, stream)
    kinds = [kind for kind in PAINT if any(bar["kind"] == kind for bar in alone)]
    colours = {kind: PAINT[kind] for kind in kinds}
    sections = [_section("One request", ranks, alone, "kind", colours, "What each rank did.")]
    if not stream:
        note = "It is drawn with several requests in flight: --in-flight 4."
        sections.append(Section("A stream of requests", [note]))
    else:
        paint = {f"{number}": f"var(--d{number % COLOURS})" for number in range(len(stream))}
        computed = [bar for bar in several if bar["kind"] in AT_WORK]
        did = " or ".join(kind for kind in AT_WORK if any(bar["kind"] == kind for bar in computed))
        note = f"When each rank {did}: a colour a request."
        sections.append(_section("A stream of requests", ranks, computed, "request", paint, note))
    return sections


def _bars(ranks: Sequence[Rank], requests: Timeline) -> list[Bar]:
    """A bar for each step, in seconds from the first."""
    zero = min((served.start for request in requests for served in request.values()), default=0.0)
    end = max((served.end for request in requests for served in request.values()), default=zero)
    count = sum(len(served.spans) for request in requests for served in request.values())
    gap = (end - zero) / MOST if count > MOST else 0.0
    return [
        {
            "rank": f"{rank} {ranks[rank].device}",
            "request": f"{number}",
            "kind": kind,
            "what": what,
            "took": format_seconds(last - first),
            "from": first - zero,
            "to": last - zero,
        }
        for number, request in enumerate(requests)
        for rank, served in sorted(request.items())
        for kind, what, first, last in _joined(served, ranks[rank], gap)
    ]


def _joined(served: Execution, rank: Rank, gap: float) -> list[tuple[str, str, float, float]]:
    """The kind, name, start and end of steps. Steps of one kind with less than `gap` between them are joined.

    A step that only launches work on a GPU is followed by the wait for that work.
    """
    joined: list[tuple[str, str, float, float]] = []
    for span in served.spans:
        computes = LAUNCHES if is_launch(span, rank) else COMPUTES
        kind = KINDS.get(type(span.step), computes)  # type: ignore[arg-type]  # others are engines' runs
        if joined and gap and joined[-1][0] == kind and span.start - joined[-1][3] < gap:
            joined[-1] = (kind, "several steps", joined[-1][2], span.end)
        else:
            joined.append((kind, describe(span, rank), span.start, span.end))
    if any(kind == LAUNCHES for kind, *_ in joined):
        joined.append((FINISHES, "its work, and its outputs", joined[-1][3], served.end))
    return joined


def _section(
    title: str, ranks: Sequence[Rank], bars: Sequence[Bar], field: str, paint: Mapping[str, str], note: str
) -> Section:
    """A timeline, coloured by a field of the bars."""
    alt = altair()
    end = max((bar["to"] for bar in bars), default=0.0) or 1e-9
    unit, worth = unit_for(end, SECONDS)
    names = [f"{number} {rank.device}" for number, rank in enumerate(ranks)]
    scaled = [{**bar, "from": bar["from"] / worth, "to": bar["to"] / worth} for bar in bars]
    scale = alt.Scale(domain=list(paint), range=list(paint.values()))
    colour = alt.Color(f"{field}:N", scale=scale, legend=None)
    domain = {"domainMin": {"expr": "first"}, "domainMax": {"expr": "last"}}
    tips = [("rank", "rank"), ("what", "step"), ("kind", "it"), ("took", "for"), ("request", "request")]
    data = alt.Chart(alt.Data(values=scaled))
    chart = (
        data.mark_bar(clip=True, stroke="var(--paper)", strokeWidth=0.5)
        .encode(
            y=alt.Y("rank:N", sort=names, title=None, scale=alt.Scale(domain=names, paddingInner=0.2)),
            x=alt.X("from:Q", title=unit, scale=alt.Scale(**domain, nice=False, zero=False)),
            x2="to:Q",
            color=colour,
            tooltip=[alt.Tooltip(f"{name}:N", title=said) for name, said in tips],
        )
        .add_params(alt.param("first", value=0), alt.param("last", value=end / worth))
    )
    chosen = alt.selection_interval(name="part", encodings=["x"], mark=alt.BrushConfig(fill="var(--ink)"))
    small = (
        data.mark_bar()
        .encode(
            y=alt.Y("rank:N", sort=names, axis=None, scale=alt.Scale(domain=names, paddingInner=0.1)),
            x=alt.X("from:Q", axis=None, scale=alt.Scale(domain=[0, end / worth], nice=False)),
            x2="to:Q",
            color=colour,
        )
        .add_params(chosen)
    )
    low = max(36, min(90, 8 * len(names)))
    means = paint if field == "kind" else {}
    large = finished(chart, height=30 * len(names))
    return Section(title, [note], legend=means, chart=large, overview=finished(small, height=low))
