"""One rank's end of all that ranks exchange: arrays go from GPU to GPU by NCCL, or through the host by mail.

NCCL connects GPUs of one rank each, and blocks a GPU until both sides take part. So ranks first tell each other what
they are about to send: a rank that has failed sends its Failure instead, and NCCL is not called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any

from splitc.runtime.arrays.array import OPERATIONS
from splitc.runtime.collectives import LOADING, Exchange, Label
from splitc.runtime.collectives.mail import Mail, all_gather, hear_labelled
from splitc.runtime.collectives.meeting import Meeting
from splitc.runtime.collectives.nccl import NcclCommunicator, NcclCommunicators
from splitc.runtime.engines import Backend, Communicator
from splitc.runtime.gpu.device import GpuDevice
from splitc.runtime.ipc.channel import portable
from splitc.runtime.package.steps import Reduce
from splitc.runtime.threads.failures import Failure, attempt


class Collectives(Exchange):
    """The end of number `rank` of `ranks` ranks, which `mail` connects. `meetings` are those of engines with operators.

    With `by_nccl`, each rank has its own GPU. Otherwise values go through the host, from and to GPUs too.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        mail: Mail,
        meetings: Mapping[tuple[int, ...], Meeting],
        backend: Backend,
        by_nccl: bool,
    ) -> None:
        self.rank = rank
        self._ranks = ranks
        self._mail = mail
        self._meetings = meetings
        self._backend = backend
        self.by_nccl = by_nccl
        self._device = backend if isinstance(backend, GpuDevice) else None
        self._gpu = self._device if by_nccl else None
        self._communicators = NcclCommunicators(rank, partial(all_gather, mail, rank))
        self._all: NcclCommunicator | None = None
        self._label = LOADING

    def connect(self) -> None:
        """Connect the GPUs of all ranks. All ranks must call this at the same time."""
        if self._gpu is not None:
            self._all = self._communicators.create(range(self._ranks), sums=False)

    def create_communicator(self, group: Sequence[int], uses_operators: bool) -> Communicator:
        """A communicator for engines of these ranks. All ranks of the group must call this at the same time.

        With `uses_operators`, the collectives inside engines are splitc's own operators. Raises PackageError if the
        library is missing, and the error of any other rank of the group.
        """
        place = list(group).index(self.rank)
        if not uses_operators:
            return self._communicators.create(group)
        if self._gpu is None:
            return self._meetings[tuple(group)].join(place, gpu=self._device)
        meeting = self._meetings[tuple(group)]
        made = self._communicators.create_later(group, self._gpu, meeting.in_memory)
        made.meet(meeting, place)
        return made

    def begin(self, request: int) -> None:
        """Begin the request with this number, which is the same on all ranks. Later exchanges belong to it.

        A rank that receives a value of another request raises HandOverError.
        """
        self._label = request, None

    def _named(self, name: str) -> Label:
        return self._label[0], name

    def release(self) -> None:
        """Release the connections between GPUs, in a process that continues. All ranks must call this together."""
        self._communicators.close()

    def send(self, target: int, name: str, value: Any) -> None:
        if isinstance(value, Failure):
            self._mail.tell(target, self._named(name), Failure(portable(value.error)))
        elif self._gpu is None:
            self._mail.tell(target, self._named(name), self._backend.download({"": value})[""])
        else:
            assert self._all is not None
            self._mail.tell(target, self._named(name), (value.shape, value.dtype))
            self._all.send(value, target, self._gpu.stream.ptr)
            self._gpu.keep(value)

    def receive(self, source: int, name: str) -> Any:
        value = hear_labelled(self._mail, self.rank, source, self._named(name))
        if isinstance(value, Failure):
            return value
        if self._gpu is None:
            return self._backend.upload(value)
        assert self._all is not None
        target = self._gpu.empty(*value)
        self._all.receive(target, source, self._gpu.stream.ptr)
        return target

    def all_gather(self, ranks: Sequence[int], value: Any) -> Any:
        """Gather a Python object from each of these ranks. Returns them in order, or the first Failure among them."""
        return all_gather(self._mail, self.rank, ranks, value, self._label)

    def all_reduce(self, step: Reduce, parts: Any) -> Any:
        if self._gpu is not None:
            return self._all_reduce_on_gpus(self._gpu, step, parts)
        if not isinstance(parts, Failure):
            names = [str(number) for number in range(len(parts))]
            parts = attempt(lambda: list(self._backend.download(dict(zip(names, parts, strict=True))).values()))
        gathered = self.all_gather(step.ranks, parts)
        if isinstance(gathered, Failure):
            return gathered
        add = OPERATIONS[step.operation]
        return [self._backend.upload(reduce(add, arrays)) for arrays in zip(*gathered, strict=True)]

    def _all_reduce_on_gpus(self, gpu: GpuDevice, step: Reduce, parts: Any) -> Any:
        # Before they agree: a rank without memory would leave the others to NCCL, which waits for it.
        failed = isinstance(parts, Failure)
        wholes: Any = parts if failed else attempt(lambda: [gpu.empty(part.shape, part.dtype) for part in parts])
        agreed = self.all_gather(step.ranks, wholes if isinstance(wholes, Failure) else None)
        if isinstance(agreed, Failure):
            return agreed
        communicator = self._communicators.find(step.ranks) or self._communicators.create(step.ranks)
        for part, whole in zip(parts, wholes, strict=True):
            communicator.all_reduce(step.operation, part, whole, gpu.stream.ptr)
        gpu.keep(*parts)
        return wholes
