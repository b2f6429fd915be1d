"""The main program of a device's process: each of its ranks runs the same loop as elsewhere, on its own thread."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from splitc.runtime.adapters.held import HeldSum
from splitc.runtime.arrays.array import Array, Zeros
from splitc.runtime.collectives.collectives import Collectives
from splitc.runtime.collectives.mail import ChannelMail, ProcessMail
from splitc.runtime.collectives.meeting import Meeting
from splitc.runtime.engines import Backend
from splitc.runtime.ipc.channel import Channel, portable
from splitc.runtime.ipc.mapped_files import NCCL, find_mapped
from splitc.runtime.ipc.shared_memory import map_memory
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.package.steps import Run, Step
from splitc.runtime.processes.begin import end_at_once
from splitc.runtime.processes.messages import (
    CAPTURED,
    REPLAYED,
    Answer,
    Ask,
    BringIn,
    Broken,
    Ended,
    Forget,
    Loaded,
    Order,
    Report,
    Start,
    pack,
    unpack,
)
from splitc.runtime.processes.wire import Control, SocketControl
from splitc.runtime.ranks.loaded import Setup, make_backend_of
from splitc.runtime.ranks.loop import Replay, Span
from splitc.runtime.ranks.request import InFlightRequest
from splitc.runtime.ranks.thread import Work, Worker
from splitc.runtime.threads.failures import Failure, attempt

# Why ranks that do not have a GPU each capture nothing.
OVER_HOST = "ranks that have no GPU each exchange values over the host"


class RankProcess:
    """One rank of a package, in the process of its device.

    `control` connects it with the session, `collectives` with the other ranks.
    """

    def __init__(
        self, setup: Setup, backend: Backend, control: Control, collectives: Collectives, cuda_graphs: bool
    ) -> None:
        backend.own_process(control.lent)
        self._control = control
        self._collectives = collectives
        ranks = setup.manifest.ranks
        self._steps: dict[int, int] = {id(step): place for place, step in enumerate(setup.rank.program)}
        self._exchanges = _exchanges(setup.manifest)
        self._slots = setup.manifest.slot_inputs
        # Ranks whose engines wait for each other must all replay a request, or none.
        self._everyone = range(len(ranks) if len(ranks) > 1 else 0)
        # The last request that failed, and its error.
        self._failed: tuple[int, BaseException] | None = None
        replays_with = self._everyone if cuda_graphs and backend.asynchronous else None
        self.worker = Worker(
            setup, backend, collectives, self._broken, replays_with, self._next, control.allocator(backend)
        )
        self.worker.ready.add_done_callback(self._announce)

    def _broken(self, error: BaseException) -> None:
        """Tell the session that this rank can't go on, unless all others fail in the same request."""
        failed = self._failed[0] if self._failed is not None and self._failed[1] is error else None
        self._control.send(Broken(portable(error), failed))

    def _announce(self, ready: Future[None]) -> None:
        """Tell the session that the engines are loaded, or why not. It waits for that message."""
        told = attempt(partial(self._announce_loaded, ready))
        if isinstance(told, Failure):
            with contextlib.suppress(OSError):  # the session is gone, which the rank's loop sees
                self._control.send(Loaded(portable(told.error)))

    def _announce_loaded(self, ready: Future[None]) -> None:
        ready.result()
        if self._everyone:
            self._connect()
        self._control.send(Loaded(None, tuple(find_mapped(os.getpid(), NCCL))))

    def _connect(self) -> None:
        """Connect the ranks, and agree on whether to capture their work."""
        if self._exchanges:
            self._collectives.connect()
        if not self._collectives.by_nccl:
            self.worker.capture_blocker = OVER_HOST
            return
        blockers = self._collectives.all_gather(self._everyone, self.worker.capture_blocker)
        if isinstance(blockers, Failure):
            raise blockers.error
        self.worker.capture_blocker = next((why for why in blockers if why), None)

    def _next(self) -> Work:
        """Wait for the next request of the rank's loop."""
        # Busy-waiting would keep Python's lock from the thread that waits for outputs.
        message = self._control.receive(spins=not self.worker.has_unfinished)
        if isinstance(message, Order):
            return self._read(message)
        if isinstance(message, Forget):
            return partial(self.worker.forget, message.sequence, message.reusable)
        if isinstance(message, BringIn):
            return self.worker.bring_in
        if isinstance(message, Ask):
            return self._report
        return None

    def _read(self, order: Order) -> InFlightRequest:
        feeds, loaded = self._control.arrays(order)
        slots = {name: loaded.pop(name) for name in self._slots & loaded.keys()}
        initial: dict[str, Array | Zeros] = {**order.zeros, **loaded}
        how = order.sequence, initial, order.in_place, order.after, order.growth
        adapters = None if order.adapters is None else HeldSum(order.adapters, slots)
        return InFlightRequest(feeds, *how, adapters=adapters, done=self._answer, number=order.number)

    def _answer(self, request: InFlightRequest) -> None:
        """Give the session the outputs of a request, or its error."""
        ((rank, execution),) = request.executions.items()
        spans = tuple((self._number_of(span), span.start, span.end) for span in execution.spans)
        error = None if request.error is None else portable(request.error)
        if request.error is not None:
            self._failed = request.number, request.error
        self._control.answer(
            Answer(request.number, None, execution.start, execution.end, spans, execution.grew, error),
            request.outputs[rank],
        )

    def _number_of(self, span: Span) -> int:
        if isinstance(span.step, Replay):
            return CAPTURED if span.step.captured else REPLAYED
        return self._steps[id(span.step)]

    def _report(self) -> None:
        self._control.send(Report(self.worker.device_memory(), tuple(self.worker.notes)))


def _exchanges(manifest: Manifest) -> bool:
    """Whether ranks exchange values between their engines' runs."""
    steps: list[Step] = [step for rank in manifest.ranks for step in rank.program]
    return any(not isinstance(step, Run) for step in steps)


def _make(
    start: Start, meetings: Sequence[int], mail: ChannelMail, control: SocketControl
) -> tuple[RankProcess, Collectives]:
    """A rank that the session has started, and its collectives. Descriptors are those of the memory of meetings."""
    manifest, device = read_manifest(start.package), start.devices[start.number]
    backend = make_backend_of(manifest, start.number, device, start.threads, start.cuda_graphs)
    memories = zip(start.meetings, map(map_memory, meetings), strict=True)
    met = {group: Meeting(len(group), memory) for group, memory in memories}
    collectives = Collectives(start.number, len(start.devices), mail, met, backend, start.by_nccl)
    setup = Setup(start.number, start.package, manifest, start.swap, start.share)
    return RankProcess(setup, backend, control, collectives, start.cuda_graphs), collectives


def _host(start: Start, descriptor: int, meetings: Sequence[int], mails: ProcessMail) -> None:
    """Run a rank until its session ends it. If the session is gone, or this fails, the whole process ends.

    `descriptor` is the socket to the session.
    """
    try:
        channel = Channel(descriptor, pack, unpack)
        mail = ChannelMail(mails, start.session, start.number, start.hosts)
        control = SocketControl(channel, start.number, start.spin)
        made = attempt(partial(_make, start, meetings, mail, control))
        if isinstance(made, Failure):  # of a library or the device: the session's caller gets it
            channel.send(Loaded(portable(made.error)))
        else:
            rank, collectives = made
            rank.worker.run()
            control.release()
            if control.closed:
                collectives.release()
        mail.finish()
        channel.send(Ended())
        channel.close()
    except (EOFError, OSError):  # the session is gone
        end_at_once()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def main(descriptor: int) -> None:
    """Host ranks until no more can come and the last one has ended.

    `descriptor` is the socket to the process that starts them.
    """
    home, mails = Channel(descriptor, pack, unpack), ProcessMail()
    ranks: list[threading.Thread] = []
    try:
        while (start := home.receive()) is not None:
            name = f"splitc rank {start.number} ({start.devices[start.number]}) of {start.package.name}"
            try:
                own, *others = [home.receive_descriptor() for _ in (None, *start.peers, *start.meetings)]
                for process in start.peers:
                    mails.connect(process, Channel(others.pop(0)))
                ranks.append(threading.Thread(target=_host, args=(start, own, others, mails), name=name))
                ranks[-1].start()
            except (OSError, RuntimeError) as error:  # the system lets this process have no more files, or threads
                print(f"error: {name}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
    except (EOFError, OSError):  # the caller's process has ended, before the thread that looks after it has seen that
        end_at_once()
    for rank in ranks:
        rank.join()
