"""The style of charts. Colours are CSS variables of the page, so that they follow light, dark and print."""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from splitc.runtime.reports.contents import Chart

FONT = "system-ui, sans-serif"
# Units of axes of bytes and of seconds, the largest first.
BYTES = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))
SECONDS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))


def altair() -> Any:
    """The library that makes charts, which is only needed for pages."""
    with _with_home():
        return importlib.import_module("altair")


@contextlib.contextmanager
def _with_home() -> Iterator[None]:
    """Users without a home, as in containers, get one for a while: altair can't be imported without."""
    try:
        Path.home()
    except RuntimeError:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["HOME"] = folder
            try:
                yield
            finally:
                del os.environ["HOME"]
    else:
        yield


def unit_for(largest: float, units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """The unit of an axis that ends at this number, and its factor."""
    return next((unit for unit in units if largest >= 1.5 * unit[1]), units[-1])


def finished(chart: Any, **properties: Any) -> Chart:
    """A chart as wide as the page, in the page's colours."""
    with altair().data_transformers.enable("default", max_rows=None):
        spec: dict[str, Any] = chart.properties(width="container", **properties).to_dict()
    ink, soft, line = "var(--ink)", "var(--soft)", "var(--line)"
    paint = dict.fromkeys(("labelColor", "titleColor"), soft)
    paint |= dict.fromkeys(("gridColor", "domainColor", "tickColor"), line)
    sizes = {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"}
    spec["background"] = "transparent"
    spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    spec["config"] = {
        "font": FONT,
        "view": {"stroke": None},
        "axis": {**sizes, **paint, "labelLimit": 150},
        "axisX": {"tickCount": 7, "labelSeparation": 6},
        "axisY": {"labelColor": ink, "domain": False, "ticks": False, "labelPadding": 8},
        "text": {"color": ink, "fontSize": 12},
    }
    return spec
