"""The ranks of a session as processes, seen from the session.

The session's process has no CUDA context. A rank that dies, hangs or can't go on ends the session with an error that
names it; the other ranks' processes are ended too, since they may wait for it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from splitc.runtime.arrays import Array, Zeros
from splitc.runtime.channel import Channel, pack
from splitc.runtime.collectives.engine_meeting import shared_bytes
from splitc.runtime.devices import Device, cores
from splitc.runtime.engines.kinds import find_kind
from splitc.runtime.errors import EngineError, PackageError
from splitc.runtime.manifest import Manifest, State
from splitc.runtime.memory_use import RankMemory
from splitc.runtime.processes.messages import Answer, Ask, Broken, Forget, Loaded, Order, Report, Start
from splitc.runtime.processes.nccl_files import find_nccl_files, remove_nccl_files
from splitc.runtime.ranks.loop import Replay, Span
from splitc.runtime.ranks.request import InFlightRequest, Served
from splitc.runtime.shared_memory import Borrower, SlotWriter, create_memory, map_memory

# What a rank's process runs.
MAIN = "splitc.runtime.processes.rank"
# Seconds without a sign of life after which a process counts as hanging.
PATIENCE = 8.0
# Seconds that the other ranks get to fail in the same request as a rank whose collectives they may wait for.
GRACE = 2.0
# Seconds that a rank looks for its next request before it sleeps, where each process has a core of its own.
SPIN = 2e-3
# Seconds between two looks at the signs of life.
LOOK = 0.5


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
        self._owner = os.getpid()
        self._feeds = SlotWriter(in_flight)
        self._outputs = [Borrower() for _ in devices]
        self._requests: dict[int, InFlightRequest] = {}
        self._count = 0
        self._files: set[str] = set()
        # None was put, and the processes end by themselves; they were all ended.
        self._closing = self._stopped = False
        # When a rank said that it can't go on, the request that others may fail in too, and the error.
        self._suspect: tuple[float, int | None, BaseException] | None = None
        self._loaded: list[Future[None]] = [Future() for _ in devices]
        self._reports: list[Future[Report]] = [Future() for _ in devices]
        pulse = create_memory(8 * len(devices))
        self._pulse = map_memory(os.dup(pulse)).view(np.float64)
        self._channels: list[Channel] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._start(Path(package), states, threads, cuda_graphs, in_flight, pulse)
        self._reader = threading.Thread(target=self._read, name="splitc ranks", daemon=True)
        self._reader.start()
        self._wait_loaded()

    def __len__(self) -> int:
        return len(self._devices)

    def _start(
        self, package: Path, states: Sequence[State], threads: int, cuda_graphs: bool, in_flight: int, pulse: int
    ) -> None:
        """Start the processes. All descriptors that are for them are closed here."""
        ranks = range(len(self._devices))
        pairs = {pair: socket.socketpair() for pair in combinations(ranks, 2)}
        meetings = {group: create_memory(shared_bytes(len(group))) for group in self._groups()}
        devices = [_seen_alone(device) for device in self._devices]
        spin = SPIN if cores() > len(devices) else 0.0
        opened = [*(each.detach() for pair in pairs.values() for each in pair), *meetings.values(), pulse]
        ends = dict(zip(pairs, zip(opened[0::2], opened[1::2], strict=False), strict=False))
        try:
            for rank, device in enumerate(self._devices):
                ours, theirs = socket.socketpair()
                channels = {b if rank == a else a: ends[a, b][rank == b] for a, b in pairs if rank in (a, b)}
                mine = {group: memory for group, memory in meetings.items() if rank in group}
                inherited = [theirs.fileno(), *channels.values(), *mine.values(), pulse]
                with theirs:
                    self._processes.append(_start_process(device, theirs.fileno(), inherited))
                self._channels.append(Channel(ours.detach()))
                start = Start(
                    package=package.absolute(),
                    number=rank,
                    devices=devices,
                    states=states,
                    threads=threads,
                    cuda_graphs=cuda_graphs,
                    in_flight=in_flight,
                    channels=channels,
                    meetings=mine,
                    pulse=pulse,
                    parent=os.getpid(),
                    spin=spin,
                )
                self._channels[rank].send(start)
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def _groups(self) -> set[tuple[int, ...]]:
        """The groups of ranks whose engines meet: to exchange values or, on GPUs, to agree on what NCCL does."""
        if not find_kind(self._manifest.engine).uses_operators:
            return set()
        files = [file for rank in self._manifest.ranks for file in rank.engines if file.group]
        return {tuple(file.group) for file in files}

    def _wait_loaded(self) -> None:
        """Wait until all ranks have loaded their engines. Raises the first error, after ending the other ranks."""
        done, _ = wait(self._loaded, return_when=FIRST_EXCEPTION)
        failed = [error for future in done if (error := future.exception()) is not None]
        if failed:
            self.stop()
            self.clear()
            raise failed[0]

    def put(self, request: InFlightRequest | None) -> None:
        """Give all ranks a request. None ends them after all earlier requests."""
        if request is None:
            self._closing = True
            for channel in self._channels:
                _send(channel, None)
            return
        if os.getpid() != self._owner:
            raise EngineError("this session belongs to the process that opened it: a copy of that one can't use it")
        if not request.begin():
            return
        number, self._count = self._count, self._count + 1
        zeros = {name: each for name, each in request.initial.items() if isinstance(each, Zeros)}
        loaded = [(name, each) for name, each in request.initial.items() if not isinstance(each, Zeros)]
        placed, descriptor = self._feeds.put(number, [*request.feeds.items(), *loaded])
        feeds, initial = placed[: len(request.feeds)], placed[len(request.feeds) :]
        self._requests[number] = request
        renewed = descriptor is not None
        unused = [each.unused() for each in self._outputs]
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
        try:
            return [report.result(PATIENCE) for report in reports]
        except (EngineError, TimeoutError):
            return []

    def _read(self) -> None:
        """Take what the ranks send, until all of them have ended."""
        poll = select.poll()
        ranks = {channel.fileno(): rank for rank, channel in enumerate(self._channels)}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        while ranks:
            for descriptor, _ in poll.poll(1e3 * LOOK):
                rank = ranks[descriptor]
                try:
                    self._take(rank, self._channels[rank].receive())
                except (EOFError, OSError):
                    poll.unregister(descriptor)
                    del ranks[descriptor]
                    self._lost(rank)
            self._look(ranks.values())

    def _take(self, rank: int, message: Any) -> None:
        """Take one message of a rank."""
        if isinstance(message, Answer):
            self._answered(rank, message)
        elif isinstance(message, Report):
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
        if request.waiting == 1:
            del self._requests[answer.number]
        request.finish(rank, outputs, Served(answer.start, answer.end, spans), answer.error)

    def _look(self, alive: Sequence[int] | Any) -> None:
        """Break the session if a rank hangs, or has failed in a request that others go on with."""
        now = time.monotonic()
        if self._suspect is not None:
            since, number, error = self._suspect
            if number is not None and number not in self._requests:
                self._suspect = None  # all ranks have failed alike, and can go on
            elif now - since > GRACE:
                self._break(error)
        for rank in alive:
            if self._pulse[rank] and now - self._pulse[rank] > PATIENCE:
                seconds = f"for {now - self._pulse[rank]:.0f} s"
                self._break(EngineError(f"{self._name(rank)} hangs: its process gave no sign of life {seconds}"))

    def _lost(self, rank: int) -> None:
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
        self._reader.join(LOOK)
        for channel in self._channels:
            channel.close()
        self._channels = []
        remove_nccl_files(self._files)


def _seen_alone(device: Device) -> Device:
    """The device as its rank's process sees it: a GPU is the only one there."""
    return device if device.kind == "cpu" else Device(device.kind, device.index, 0)


def _start_process(device: Device, control: int, inherited: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a rank's process, with this process's import path, whatever the caller's main module is."""
    program = f"import sys; sys.path[:] = {sys.path!r}; from {MAIN} import main; main()"
    environment = {**os.environ, **_visible(device, os.environ)}
    return subprocess.Popen(
        [sys.executable, "-c", program, str(control)], stdin=subprocess.DEVNULL, pass_fds=inherited, env=environment
    )


def _visible(device: Device, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that let a process see this GPU alone. Raises PackageError if it is none that this one sees.

    ONNX Runtime's XQA kernels, which make tokens faster, only work on the first GPU of a process: here they are on,
    unless the user says otherwise.
    """
    if device.kind == "cpu":
        return {}
    seen = environment.get("CUDA_VISIBLE_DEVICES")
    names = None if seen is None else [name.strip() for name in seen.split(",") if name.strip()]
    if names is not None and device.index >= len(names):
        raise PackageError(f"there is no {device}: CUDA_VISIBLE_DEVICES names {len(names)} GPUs")
    xqa = {"ORT_ENABLE_XQA": environment.get("ORT_ENABLE_XQA", "1")}
    return {"CUDA_VISIBLE_DEVICES": str(device.index) if names is None else names[device.index], **xqa}


def _send(channel: Channel, message: Any, descriptor: int | None = None) -> None:
    """Send, unless the other end is gone: whoever reads from it notices that."""
    with contextlib.suppress(OSError):
        channel.send(message, descriptor)
