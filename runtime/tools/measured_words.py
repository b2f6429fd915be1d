"""What the times of ranks do not tell apart, said to the user beside them."""

from __future__ import annotations

from collections.abc import Sequence

from splitc.runtime.hardware.devices import device_named
from splitc.runtime.package.manifest import Rank
from splitc.runtime.package.steps import Run
from splitc.runtime.ranks.loop import Replay, Span
from splitc.runtime.tools.trace import Timeline

REPLAYED = (
    "A replayed request is one step of each rank: busy is all of it, with sums with other ranks and waits for them."
)
LAUNCHED = (
    "GPUs work after they are told to, and times of steps are those of telling them: overhead has the wait until a GPU "
    "is done."
)
INSIDE = "What ranks exchange is inside their engines: busy has it, and the waits for slower ranks."


def say_measured(ranks: Sequence[Rank], requests: Timeline) -> list[str]:
    """Sentences on what the times of these requests have in them."""
    ran = [(ranks[number], span) for request in requests for number, served in request.items() for span in served.spans]
    said = {
        REPLAYED: any(isinstance(span.step, Replay) for _, span in ran),
        LAUNCHED: any(is_launch(span, rank) for rank, span in ran),
        INSIDE: any(_meets(span, rank) for rank, span in ran),
    }
    return [text for text, holds in said.items() if holds]


def is_launch(span: Span, rank: Rank) -> bool:
    """Whether a step only told a GPU what to do."""
    return isinstance(span.step, Run) and device_named(rank.device).kind == "cuda"


def _meets(span: Span, rank: Rank) -> bool:
    return isinstance(span.step, Run) and bool(rank.engines[span.step.engine].group)
