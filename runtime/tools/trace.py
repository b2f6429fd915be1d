"""Timelines of the ranks' steps: a Chrome trace for Perfetto, or a few lines of text; and what their times include."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from splitc.runtime.files.written import written_whole
from splitc.runtime.hardware.devices import device_named
from splitc.runtime.package.manifest import Rank
from splitc.runtime.package.steps import Receive, Reduce, Run
from splitc.runtime.ranks.loop import Replay, Span
from splitc.runtime.ranks.request import Execution

# For each request, the times of each rank's steps.
Timeline = Sequence[Mapping[int, Execution]]

# The characters of the text timeline, by the least share of a column's time that the rank's engines ran.
SHADES = ((0.75, "█"), (0.5, "▓"), (0.25, "▒"), (0.02, "░"), (0.0, " "))


def describe(span: Span, rank: Rank) -> str:
    """A step's name for users."""
    step = span.step
    if isinstance(step, Run):
        return rank.engines[step.engine].path.rpartition("/")[2]
    if isinstance(step, Replay):
        return "a CUDA graph"
    if isinstance(step, Reduce):
        return f"{step.operation} of {len(step.wholes)} over {len(step.ranks)} ranks"
    return f"from rank {step.source}" if isinstance(step, Receive) else f"to rank {step.target}"


def write_trace(path: Path, ranks: Sequence[Rank], requests: Timeline) -> None:
    """Write all requests' steps in Chrome's trace format, with a row for each rank.

    The format is that of the "Trace Event Format" document of the Chromium project, with times in microseconds. Raises
    MisuseError if the file can't be written.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": f"rank {number} ({rank.device})"}}
        for number, rank in enumerate(ranks)
    ]
    zero = min((served.start for request in requests for served in request.values()), default=0.0)
    for number, request in enumerate(requests):
        for rank, served in request.items():
            events += [
                {
                    "ph": "X",
                    "name": describe(span, ranks[rank]),
                    "cat": type(span.step).__name__.lower(),
                    "pid": 0,
                    "tid": rank,
                    "ts": 1e6 * (span.start - zero),
                    "dur": 1e6 * (span.end - span.start),
                    "args": {"request": number},
                }
                for span in served.spans
            ]
    with written_whole(path) as file:
        file.write(msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))


def draw_timeline(ranks: int, requests: Timeline, width: int) -> list[str]:
    """A line for each rank. Each column shows how much of its time the rank's engines ran."""
    spans = [[span for request in requests if rank in request for span in request[rank].spans] for rank in range(ranks)]
    every = [span for rank in spans for span in rank]
    if not every:
        return ["" for _ in range(ranks)]
    zero, end = min(span.start for span in every), max(span.end for span in every)
    edges = np.linspace(zero, max(end, zero + 1e-9 * width), width + 1)
    lines = []
    for rank in spans:
        busy = np.zeros(width)
        for span in (span for span in rank if isinstance(span.step, (Run, Replay))):
            busy += np.maximum(0.0, np.minimum(edges[1:], span.end) - np.maximum(edges[:-1], span.start))
        shares = busy / (edges[1] - edges[0])
        lines.append("".join(next(shade for least, shade in SHADES if share >= least) for share in shares))
    return lines


REPLAYED = "A replayed request is one step a rank: busy includes its collectives and the waits for other ranks."
LAUNCHED = (
    "GPUs work asynchronously: the time of a step is the time to launch it, and overhead includes the wait for the GPU."
)
INSIDE = "Collectives run inside the engines: busy includes them, and the waits for slower ranks."


def time_caveats(ranks: Sequence[Rank], requests: Timeline) -> list[str]:
    """What the times of these requests include, a sentence each."""
    ran = [(ranks[number], span) for request in requests for number, served in request.items() for span in served.spans]
    said = {
        REPLAYED: any(isinstance(span.step, Replay) for _, span in ran),
        LAUNCHED: any(is_launch(span, rank) for rank, span in ran),
        INSIDE: any(isinstance(span.step, Run) and rank.engines[span.step.engine].group for rank, span in ran),
    }
    return [text for text, holds in said.items() if holds]


def is_launch(span: Span, rank: Rank) -> bool:
    """Whether a step only launched work on a GPU."""
    return isinstance(span.step, Run) and device_named(rank.device).kind == "cuda"
