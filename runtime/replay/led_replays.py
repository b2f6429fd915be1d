"""The CUDA graphs of a rank that is led: it is fed nothing, and so is told which requests to record and to replay."""

from __future__ import annotations

from collections.abc import Sequence

from splitc.runtime.arrays import Array
from splitc.runtime.engines.gpu_device import GpuDevice
from splitc.runtime.manifest import Manifest
from splitc.runtime.ranks.loop import Span
from splitc.runtime.ranks.request import InFlightRequest
from splitc.runtime.ranks.thread import Worker
from splitc.runtime.replay.lead import Act, Lead, find_lead
from splitc.runtime.replay.rank_replays import RankReplays
from splitc.runtime.replay.recording import STATELESS, Recording


class LedReplays(RankReplays):
    """The recordings of a rank that `lead` tells what to do, by the numbers that the leading rank gives them."""

    def __init__(self, everyone: Sequence[int], lead: Lead) -> None:
        super().__init__((), everyone)
        self._leader = lead
        self._numbered: dict[int, Recording] = {}

    def play(self, worker: Worker, request: InFlightRequest) -> tuple[dict[str, Array], Span] | None:
        """See Replays."""
        gpu = worker.backend
        assert isinstance(gpu, GpuDevice)
        if worker.capture_blocker is not None:
            return None
        act, number, kept = self._leader.hear(worker)
        self._numbered = {each: made for each, made in self._numbered.items() if each in (number, *kept)}
        if act is Act.RECORD:
            first = self._record(worker, gpu, request, (number,), STATELESS, number)
            if first is not None:
                self._numbered[number] = first[0]
            return None if first is None else first[1]
        if act is Act.EAGER or number not in self._numbered:
            return None
        worker.drain()  # so that requests end in order
        return self._numbered[number].launch(worker, gpu, request)

    def forget(self, worker: Worker, sequence: int) -> None:
        """See Replays. A rank that is led has no states."""

    def clear(self) -> None:
        """See Replays."""
        self._numbered.clear()


def make_replays(manifest: Manifest, number: int, everyone: Sequence[int]) -> RankReplays:
    """The recordings of a rank: see RankReplays."""
    lead = find_lead(manifest, number)
    if lead is not None and lead.group.index(number) in lead.led:
        return LedReplays(everyone, lead)
    optional = [tensor.name for tensor in manifest.optional]
    return RankReplays(optional, everyone, lead, lead is not None or not everyone or _see_alike(manifest))


def _see_alike(manifest: Manifest) -> bool:
    """Whether all ranks have states of a sequence, or none: then all see alike when a request has those of another."""
    inputs = {state.input for state in manifest.states}
    return len({inputs.isdisjoint(rank.inputs) for rank in manifest.ranks}) == 1
