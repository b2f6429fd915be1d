"""The content of a page: chapters (one per module) of sections, each with a strip, a chart or tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# A chart as Vega-Lite has it.
Chart = Mapping[str, Any]
# Labels with their text: ("engine", "onnxruntime").
Facts = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """Rows of text below a title, which are folded away if `folded`. Columns named in `right` hold numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[str] = ()
    folded: bool = True


@dataclass(frozen=True)
class StripRank:
    """A rank in a strip: its number, device, weights in bytes, and which of its stage's blocks it holds.

    `bytes` cross between it and the main rank in a run, in row mode.
    """

    number: int
    device: str
    weights: int
    holds: Sequence[bool]
    bytes: int | None = None


@dataclass(frozen=True)
class StripStage:
    """Blocks by name, and the ranks that share them. `bytes` cross to the next stage in a run; None after the last."""

    blocks: Sequence[str]
    ranks: Sequence[StripRank]
    bytes: int | None = None


@dataclass(frozen=True)
class Section:
    """A part of a chapter. `overview` is a small chart in which a part of `chart` is chosen.

    `legend` has the colours of the chart by what they mean. They are in the page's text, which fits phones. A reader
    filters the rows of `search` by text; its title says what to search for.
    """

    title: str
    notes: Sequence[str] = ()
    strip: Sequence[StripStage] = ()
    legend: Mapping[str, str] = field(default_factory=dict)
    chart: Chart | None = None
    overview: Chart | None = None
    tables: Sequence[Table] = ()
    search: Table | None = None


@dataclass(frozen=True)
class Chapter:
    """The sections of one module, or of all together. `title` is empty on the page of a single model.

    `verdict` has the changes to make and their expected gain, the most important first.
    """

    title: str
    facts: Facts = ()
    verdict: Sequence[str] = ()
    notes: Sequence[str] = ()
    sections: Sequence[Section] = ()


@dataclass(frozen=True)
class Page:
    """A page. `warnings` are shown first."""

    title: str
    subtitle: str
    chapters: Sequence[Chapter]
    warnings: Sequence[str] = field(default=())
