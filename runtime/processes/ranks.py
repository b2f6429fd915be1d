"""The ranks of a session as processes, seen from the session.

The session's process has no CUDA context. A rank that dies, hangs or can't go on ends the session with an error that
names it; the other ranks' processes are ended too, since they may wait for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from splitc.runtime.arrays import Array, Zeros
from splitc.runtime.channel import Channel
from splitc.runtime.devices import Device
from splitc.runtime.errors import EngineError, PackageError
from splitc.runtime.futures import first_error
from splitc.runtime.manifest import Manifest, State
from splitc.runtime.memory_use import RankMemory
from splitc.runtime.processes.launch import launch
from splitc.runtime.processes.messages import Answer, Ask, Broken, Forget, Loaded, Order, Report, pack
from splitc.runtime.processes.nccl_files import find_nccl_files, remove_nccl_files
from splitc.runtime.processes.reader import Reader
from splitc.runtime.ranks.loop import Replay, Span
from splitc.runtime.ranks.request import InFlightRequest, Served
from splitc.runtime.shared_memory import Borrower, SlotWriter

# Seconds without a sign of life after which a process counts as hanging.
PATIENCE = 8.0
# The same, until the first one.
FIRST_PATIENCE = 20.0
# Seconds that the other ranks get to fail in the same request as a rank whose collectives they may wait for.
GRACE = 2.0


class RankProcesses:
    """The ranks of a package, each a process that has loaded its engines. `states` are those that stay on the ranks.

    `broken` is called once if a rank can't go on. Raises PackageError if a rank can't load its engines.
    """

    capturable = False
    by_host: Sequence[tuple[int, int]] = ()

    def __init__(
        self,
        package: Path,
        manifest: Manifest,
        states: Sequence[State],
        devices: Sequence[Device],
        threads: int,
        cuda_graphs: bool,
        in_flight: int,
        broken: Callable[[BaseException], None],
    ) -> None:
        self._manifest = manifest
        self._devices = devices
        self._broken = broken
        self._feeds = SlotWriter(in_flight)
        self._outputs = [Borrower() for _ in devices]
        self._requests: dict[int, InFlightRequest] = {}
        self._count = 0
        self._files: set[str] = set()
        # That the last answer took.
        self._seconds = 0.0
        # None was put, and the processes end by themselves; they were all ended.
        self._closing = self._stopped = False
        # When a rank said that it can't go on, the request that others may fail in too, and the error.
        self._suspect: tuple[float, int | None, BaseException] | None = None
        self._loaded: list[Future[None]] = [Future() for _ in devices]
        self._reports: list[Future[Report]] = []
        self._began = time.monotonic()
        made = launch(package, manifest, devices, states, threads, cuda_graphs, in_flight)
        self._pulse, self._channels, self._processes = made.pulse, made.channels, made.processes
        self._reader = Reader(self._channels, self, made.spins)
        self._reader.wake()
        self._wait_loaded()

    def __len__(self) -> int:
        return len(self._devices)

    def _wait_loaded(self) -> None:
        """Wait until all ranks have loaded their engines. Raises the first error, after ending the other ranks."""
        error = first_error(self._loaded)
        if error is not None:
            self.stop()
            self.clear()
            raise error

    def put(self, request: InFlightRequest | None) -> None:
        """Give all ranks a request. None ends them after all earlier requests."""
        if request is None:
            self._closing = True
            for channel in self._channels:
                _send(channel, None)
            self._reader.wake()
            return
        if not request.begin():
            return
        number, self._count = self._count, self._count + 1
        zeros = {name: each for name, each in request.initial.items() if isinstance(each, Zeros)}
        loaded = [(name, each) for name, each in request.initial.items() if not isinstance(each, Zeros)]
        placed, descriptor = self._feeds.put(number, [*request.feeds.items(), *loaded])
        feeds, initial = tuple(placed[: len(request.feeds)]), tuple(placed[len(request.feeds) :])
        self._requests[number] = request
        renewed = descriptor is not None
        unused = tuple(tuple(each.unused()) for each in self._outputs)
        order = pack(Order(number, feeds, initial, zeros, request.sequence, request.room, renewed, unused))
        for channel in self._channels:
            _send(channel, order, descriptor)
        if descriptor is not None:
            os.close(descriptor)

    def forget(self, sequence: int) -> None:
        """Free the states of a sequence."""
        for channel in self._channels:
            _send(channel, Forget(sequence))

    @property
    def notes(self) -> list[str]:
        """Messages of the ranks for the user."""
        return list(dict.fromkeys(note for report in self._ask() for note in report.notes))

    def device_memory(self) -> list[RankMemory]:
        """The memory of the ranks' GPUs since loading; empty for CPU devices."""
        return [report.memory for report in self._ask() if report.memory is not None]

    def _ask(self) -> list[Report]:
        """A report of each rank, after all earlier requests. Empty if the session is broken or closed."""
        self._reports = [Future() for _ in self._devices]
        reports = list(self._reports)
        for channel in self._channels:
            _send(channel, Ask())
        self._reader.wake()
        try:
            return [report.result(PATIENCE) for report in reports]
        except (EngineError, TimeoutError):
            return []

    def read_until(self, future: Future[InFlightRequest]) -> None:
        """Help a caller who waits for a request: read what the ranks send, unless another thread does."""
        self._reader.read_until(future, self._seconds)

    def watch(self) -> None:
        """Read what the ranks send of requests that no caller waits for yet."""
        self._reader.wake()

    def is_waiting(self) -> bool:
        """See Receiver."""
        unknown: Sequence[Future[Any]] = (*self._loaded, *self._reports)
        return bool(self._requests or self._suspect or self._closing) or not all(each.done() for each in unknown)

    def take(self, rank: int, message: Any) -> None:
        """Take one message of a rank. Those of ranks that were ended come too late: all waits for them have ended."""
        if self._stopped:
            return
        if isinstance(message, Answer):
            self._answered(rank, message)
        elif isinstance(message, Report):
            if not self._reports[rank].done():  # whoever asked first may have given up
                self._reports[rank].set_result(message)
        elif isinstance(message, Loaded):
            self._files.update(message.files)
            if message.error is None:
                self._loaded[rank].set_result(None)
            else:
                self._loaded[rank].set_exception(message.error)
        elif isinstance(message, Broken):
            error = EngineError(f"{self._name(rank)} failed: {message.error}")
            self._suspect = self._suspect or (time.monotonic(), message.request, error)

    def _answered(self, rank: int, answer: Answer) -> None:
        """Give a request its outputs of one rank."""
        outputs: dict[str, Array] = {}
        if answer.outputs is not None:
            descriptor = self._channels[rank].receive_descriptor() if answer.outputs.size else None
            outputs = self._outputs[rank].receive(answer.outputs, descriptor)
        steps = self._manifest.ranks[rank].program
        spans = [Span(steps[number] if number >= 0 else Replay(), start, end) for number, start, end in answer.spans]
        request = self._requests[answer.number]
        self._seconds = answer.end - request.submitted
        if request.waiting == 1:
            del self._requests[answer.number]
        request.finish(rank, outputs, Served(answer.start, answer.end, spans), answer.error)

    def look(self, alive: Sequence[int]) -> None:
        """Break the session if a rank hangs, or has failed in a request that others go on with."""
        now = time.monotonic()
        if self._suspect is not None:
            since, number, error = self._suspect
            if number is not None and number not in self._requests:
                self._suspect = None  # all ranks have failed alike, and can go on
            elif now - since > GRACE:
                self._break(error)
        for rank in alive:
            silent = now - (self._pulse[rank] or self._began)
            if silent > (PATIENCE if self._pulse[rank] else FIRST_PATIENCE):
                how = f"its process gave no sign of life for {silent:.0f} s"
                self._break(EngineError(f"{self._name(rank)} hangs: {how}"))

    def lost(self, rank: int) -> None:
        """The process of a rank has ended."""
        code = self._processes[rank].wait()
        if self._stopped or (self._closing and code == 0):
            return
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        error = EngineError(f"the process of {self._name(rank)} {how}")
        if not self._loaded[rank].done():
            self._loaded[rank].set_exception(PackageError(str(error)))
        self._break(error)

    def _break(self, error: BaseException) -> None:
        """End all ranks, and the session with this error."""
        if not self._stopped:
            self.stop()
            for report in self._reports:
                if not report.done():
                    report.set_exception(EngineError(str(error)))
            if all(future.done() and future.exception() is None for future in self._loaded):
                self._broken(error)
            for future in self._loaded:
                if not future.done():
                    future.set_exception(PackageError(str(error)))

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._devices[rank]})"

    def abort(self, error: BaseException) -> None:
        """End all ranks, which may wait for each other."""
        self.stop()

    def stop(self) -> None:
        """End all ranks at once."""
        self._stopped = True
        running = [process for process in self._processes if process.poll() is None]
        for process in running:
            self._files |= find_nccl_files(process.pid)
        for process in running:
            process.kill()
        for process in running:
            process.wait()
        remove_nccl_files(self._files)

    def join(self, patience: float) -> bool:
        """Wait for the ranks to end, for at most `patience` seconds. Returns whether they have ended."""
        deadline = time.monotonic() + patience
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
        return True

    def clear(self) -> None:
        """Release the ranks after they have ended."""
        self._reader.join()
        for channel in self._channels:
            channel.close()
        self._channels = []
        remove_nccl_files(self._files)


def _send(channel: Channel, message: Any, descriptor: int | None = None) -> None:
    """Send, unless the other end is gone: whoever reads from it notices that."""
    with contextlib.suppress(OSError):
        channel.send(message, descriptor)
