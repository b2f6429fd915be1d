"""The error of each output of a check, and the allowed error."""

from __future__ import annotations

import math
from collections.abc import Sequence

from splitc.runtime.reports.contents import Chart, Section, Table
from splitc.runtime.reports.theme import altair, finished
from splitc.runtime.tools.compare import Difference
from splitc.runtime.units import shortened_middle

# The most outputs that are drawn, the worst first; the table has all.
SHOWN = 40
# The place of an error of 0 on the logarithmic axis: below all others.
LEAST = 1e-10
AGREES, DIFFERS = "agrees", "differs"
PAINT = {AGREES: "var(--good)", DIFFERS: "var(--bad)"}
# The most characters of an output's name beside the chart.
LONGEST = 22


def errors_section(differences: Sequence[Difference]) -> Section:
    """The errors of outputs, the worst first."""
    worst = sorted(differences, key=lambda difference: (difference.passed, -difference.relative))
    drawn = [difference for difference in worst if math.isfinite(difference.relative)][:SHOWN]
    notes = [f"{difference.name}: {difference.problem}" for difference in worst if difference.problem]
    if len(drawn) < len(differences):
        notes.append(f"The chart has {len(drawn)} of {len(differences)} outputs, the table all.")
    return Section(
        "Errors by output",
        ["Each output's largest error, divided by its largest value. The line is what is allowed.", *notes],
        legend=PAINT if any(not difference.passed for difference in drawn) else {},
        chart=_chart(drawn) if drawn else None,
        tables=[_table(worst)],
    )


def _chart(drawn: Sequence[Difference]) -> Chart:
    alt = altair()
    rows = [
        {
            "output": difference.name,
            "label": f"{number}\n{shortened_middle(difference.name, LONGEST)}",
            "error": f"{difference.relative:.2e}",
            "at": _place(difference),
            "value": max(LEAST, difference.relative),
            "kind": AGREES if difference.passed else DIFFERS,
            "allowed": max(LEAST, difference.allowed),
            "limit": f"{difference.allowed:.2e}",
        }
        for number, difference in enumerate(drawn)
    ]
    values = [max(LEAST, number) for difference in drawn for number in (difference.relative, difference.allowed)]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 0.1)
    said = f"datum.value <= {2 * LEAST} ? '0' : format(datum.value, '~e')"
    axis = alt.Axis(title="relative error", labelExpr=said, values=[10.0**power for power in range(low, high + 1)])
    scale = alt.Scale(type="log", domain=[10.0 ** (low - 0.2), 10.0**high], nice=False)
    base = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y("label:N", sort=None, axis=alt.Axis(title=None, labelExpr="split(datum.label, '\\n')[1]", grid=True)),
        tooltip=[alt.Tooltip(f"{column}:N") for column in ("output", "kind", "error", "at", "limit")],
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


def _table(differences: Sequence[Difference]) -> Table:
    right = ("largest error", "relative", "allowed", "expected", "got")
    rows = [
        (
            difference.name,
            f"{difference.absolute:.2e}",
            f"{difference.relative:.2e}",
            f"{difference.allowed:.2e}",
            _place(difference),
            f"{difference.expected:.6g}",
            f"{difference.actual:.6g}",
            AGREES if difference.passed else f"{DIFFERS} {difference.problem or ''}",
        )
        for difference in differences
    ]
    return Table("Errors in numbers", ("output", *right[:3], "at", *right[3:], ""), rows, right)


def _place(difference: Difference) -> str:
    return ",".join(map(str, difference.where))
