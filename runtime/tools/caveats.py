"""What the measured times of ranks include, for the user."""

from __future__ import annotations

from collections.abc import Sequence

from splitc.runtime.hardware.devices import device_named
from splitc.runtime.package.manifest import Rank
from splitc.runtime.package.steps import Run
from splitc.runtime.ranks.loop import Replay, Span
from splitc.runtime.tools.trace import Timeline

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
