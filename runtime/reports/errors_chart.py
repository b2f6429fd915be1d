"""The error of each output of a check, against what is allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from splitc.runtime.reports.contents import Chart, Section, Table
from splitc.runtime.reports.theme import altair, finished
from splitc.runtime.tools.compare import Difference
from splitc.runtime.units import shortened_middle

# The most outputs that are drawn, the worst first; the table has all.
SHOWN = 40
# Where an error of 0 stands on the axis of powers of ten: below all others.
LEAST = 1e-10
AGREES, DIFFERS = "agrees", "differs"
PAINT = {AGREES: "var(--good)", DIFFERS: "var(--bad)"}
# The most characters of an output's name beside the chart.
LONGEST = 22


def errors_section(found: Sequence[Difference]) -> Section:
    """The errors of outputs, the worst first."""
    worst = sorted(found, key=lambda each: (each.passed, -each.relative))
    drawn = [each for each in worst if math.isfinite(each.relative)][:SHOWN]
    notes = [f"{each.name}: {each.problem}" for each in worst if each.problem]
    if len(drawn) < len(found):
        notes.append(f"The chart has {len(drawn)} of {len(found)} outputs, the table all.")
    return Section(
        "Errors by output",
        ["Each output's largest error, divided by its largest value. The line is what is allowed.", *notes],
        legend=PAINT if any(not each.passed for each in drawn) else {},
        chart=_chart(drawn) if drawn else None,
        tables=[_table(worst)],
    )


def _chart(drawn: Sequence[Difference]) -> Chart:
    alt = altair()
    rows = [
        {
            "output": each.name,
            "label": f"{number}\n{shortened_middle(each.name, LONGEST)}",
            "error": f"{each.relative:.2e}",
            "at": _place(each),
            "value": max(LEAST, each.relative),
            "kind": AGREES if each.passed else DIFFERS,
            "allowed": max(LEAST, each.allowed),
            "limit": f"{each.allowed:.2e}",
        }
        for number, each in enumerate(drawn)
    ]
    values = [max(LEAST, number) for each in drawn for number in (each.relative, each.allowed)]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 0.1)
    said = f"datum.value <= {2 * LEAST} ? '0' : format(datum.value, '~e')"
    axis = alt.Axis(title="relative error", labelExpr=said, values=[10.0**power for power in range(low, high + 1)])
    scale = alt.Scale(type="log", domain=[10.0 ** (low - 0.2), 10.0**high], nice=False)
    base = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y("label:N", sort=None, axis=alt.Axis(title=None, labelExpr="split(datum.label, '\\n')[1]", grid=True)),
        tooltip=[alt.Tooltip(f"{each}:N") for each in ("output", "kind", "error", "at", "limit")],
    )
    colour = alt.Color("kind:N", scale=alt.Scale(domain=list(PAINT), range=list(PAINT.values())), legend=None)
    shape = alt.Shape("kind:N", scale=alt.Scale(domain=list(PAINT), range=["circle", "cross"]), legend=None)
    errors = base.mark_point(filled=True, size=90, opacity=1).encode(
        x=alt.X("value:Q", scale=scale, axis=axis), color=colour, shape=shape
    )
    limits = base.mark_tick(color="var(--soft)", thickness=2, bandSize=16).encode(
        x=alt.X("allowed:Q", scale=scale, axis=axis)
    )
    return finished(alt.layer(limits, errors), height=24 * len(rows))


def _table(found: Sequence[Difference]) -> Table:
    right = ("largest error", "relative", "allowed", "expected", "got")
    rows = [
        (
            each.name,
            f"{each.absolute:.2e}",
            f"{each.relative:.2e}",
            f"{each.allowed:.2e}",
            _place(each),
            f"{each.expected:.6g}",
            f"{each.actual:.6g}",
            AGREES if each.passed else f"{DIFFERS} {each.problem or ''}",
        )
        for each in found
    ]
    return Table("Errors in numbers", ("output", *right[:3], "at", *right[3:], ""), rows, right)


def _place(each: Difference) -> str:
    return ",".join(map(str, each.where))
