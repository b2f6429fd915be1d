"""The candidates that auto mode compared: time against memory, with the chosen one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from splitc.compiler.planning.plan import Alternative, Plan
from splitc.runtime.reports.contents import Chart, Section, Table
from splitc.runtime.reports.theme import BYTES, SECONDS, altair, finished, unit_for
from splitc.runtime.units import format_bytes, format_seconds

# Modes have the colours of devices.
PAINT = {"layer": "var(--d0)", "row": "var(--d1)", "tensor": "var(--d2)", "batch": "var(--d4)"}
REST = "var(--d7)"
# Times are on a logarithmic scale if the slowest is more than this many times the fastest.
SPREAD = 20
# The distance below which points' numbers would overlap: as a share of the chart's width, and of its height.
NEAR = (0.03, 0.06)
# The margin on both sides of the chart, as a share of its width.
ROOM = 0.2


def candidates_section(plan: Plan) -> Section | None:
    """The candidates of auto mode; None if the mode was given."""
    if plan.choice is None:
        return None
    possible = [candidate for candidate in plan.alternatives if candidate.refused is None]
    if len(possible) < 2:
        return Section("What was compared", [f"Chosen: {plan.choice}."], tables=[replace(_table(plan), folded=False)])
    best = _unbeaten(plan, possible)
    named = ", ".join(f"{number} {candidate.name}" for number, candidate in enumerate(best, 1))
    return Section(
        "What was compared",
        [f"Chosen: {plan.choice}.", f"No other beats these in both time and memory: {named}."],
        legend={mode: PAINT.get(mode, REST) for mode in _modes(possible)},
        chart=_chart(plan, possible, best),
        tables=[_table(plan)],
    )


def is_chosen(plan: Plan, candidate: Alternative) -> bool:
    """Whether auto mode chose this candidate."""
    return (plan.choice or "").startswith(f"{candidate.name}: ")


def seconds_for(objective: str, candidate: Alternative) -> float:
    """The time that an objective minimizes."""
    return candidate.latency if objective == "latency" else candidate.interval


def _unbeaten(plan: Plan, possible: list[Alternative]) -> list[Alternative]:
    """The candidates that no other one beats in both time and memory, fastest first."""
    both = [(seconds_for(plan.objective, candidate), max(candidate.peaks)) for candidate in possible]
    best = [candidate for candidate, own in zip(possible, both, strict=True) if not _is_beaten(own, both)]
    return sorted(best, key=lambda candidate: seconds_for(plan.objective, candidate))


def _chart(plan: Plan, possible: list[Alternative], best: list[Alternative]) -> Chart:
    """The chart. The best candidates have numbers instead of names, which would overlap."""
    alt = altair()
    is_latency = plan.objective == "latency"
    seconds = [seconds_for(plan.objective, candidate) for candidate in possible]
    peaks = [max(candidate.peaks) for candidate in possible]
    (time, second), (size, byte) = unit_for(max(seconds), SECONDS), unit_for(max(peaks), BYTES)
    numbers_at = _numbers(plan, best, max(seconds) - min(seconds), max(peaks))
    rows: list[dict[str, Any]] = [
        {
            "candidate": candidate.name,
            "mode": _mode(candidate),
            "chosen": is_chosen(plan, candidate),
            "number": numbers_at.get(candidate.name, ""),
            "best": candidate in best,
            "time": took / second,
            "peak": peak / byte,
            "request": format_seconds(candidate.latency),
            "stream": format_seconds(candidate.interval),
            "fullest": format_bytes(peak),
        }
        for candidate, took, peak in zip(possible, seconds, peaks, strict=True)
    ]
    low, high = min(seconds) / second, max(seconds) / second
    if is_log := high > SPREAD * low > 0:
        ends = [low / 2, high * 2]
    else:  # room for the points, but not below zero
        room = ROOM * (high - low or high)
        ends = [max(0.0, low - room), high + room]
    times = alt.Scale(type="log" if is_log else "linear", domain=ends, nice=False)
    title = f"{'a request' if is_latency else 'between requests of a stream'}, {time}"
    tips = {"candidate": "candidate", "request": "a request", "stream": "in a stream", "fullest": "fullest device"}
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("time:Q", title=title, scale=times),
        y=alt.Y("peak:Q", title=f"fullest device, {size}", scale=alt.Scale(domain=[0, 1.1 * max(peaks) / byte])),
        tooltip=[alt.Tooltip(f"{field}:N", title=said) for field, said in tips.items()],
    )
    modes = _modes(possible)
    colour = alt.Color(
        "mode:N", scale=alt.Scale(domain=modes, range=[PAINT.get(mode, REST) for mode in modes]), legend=None
    )
    clear = alt.condition("datum.best || datum.chosen", alt.value(1), alt.value(0.45))
    points = base.mark_point(filled=True, size=110).encode(color=colour, opacity=clear)
    ring = base.transform_filter("datum.chosen").mark_point(size=420, strokeWidth=2.5, stroke="var(--ink)")
    numbers = base.mark_text(dy=-18, fontWeight="bold").encode(text="number:N")
    return finished(alt.layer(points, ring, numbers), height=320)


def _numbers(plan: Plan, best: list[Alternative], time: float, peak: float) -> dict[str, str]:
    """The label of each point. Of points that are near each other, the first has all their numbers."""
    labels: dict[str, str] = {}
    first: Alternative | None = None
    for number, candidate in enumerate(best, 1):
        if first is not None:
            apart = (
                abs(seconds_for(plan.objective, candidate) - seconds_for(plan.objective, first)),
                abs(max(candidate.peaks) - max(first.peaks)),
            )
            if apart[0] <= NEAR[0] * time and apart[1] <= NEAR[1] * peak:
                labels[first.name] += f", {number}"
                continue
        first = candidate
        labels[candidate.name] = f"{number}"
    return labels


def _is_beaten(one: tuple[float, int], both: list[tuple[float, int]]) -> bool:
    """Whether another one is no worse in both time and memory, and better in one."""
    return any(time <= one[0] and peak <= one[1] and (time, peak) != one for time, peak in both)


def _mode(candidate: Alternative) -> str:
    return candidate.mode if candidate.devices > 1 else "one device"


def _modes(possible: list[Alternative]) -> list[str]:
    return list(dict.fromkeys(map(_mode, possible)))


def _table(plan: Plan) -> Table:
    numbers = ("a request", "in a stream", "fullest device")
    rows = []
    for candidate in plan.alternatives:
        name = f"{candidate.name} (chosen)" if is_chosen(plan, candidate) else candidate.name
        if candidate.refused is not None:
            rows.append((name, "", "", "", candidate.refused))
        else:
            times = (format_seconds(candidate.latency), format_seconds(candidate.interval))
            rows.append((name, *times, format_bytes(max(candidate.peaks)), candidate.placement))
    return Table("Candidates in numbers", ("candidate", *numbers, ""), rows, numbers)
