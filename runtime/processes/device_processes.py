"""The rank processes: one for each device, with this device's ranks of all models that share it."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

import numpy as np

from splitc.runtime.errors import EngineError, PackageError
from splitc.runtime.hardware.devices import Device
from splitc.runtime.ipc.channel import Channel
from splitc.runtime.ipc.child_python import python_command
from splitc.runtime.ipc.mapped_files import NCCL, find_mapped, remove_files
from splitc.runtime.ipc.shared_memory import create_memory, map_memory
from splitc.runtime.processes.messages import Start, pack, unpack

# The modules that a process of ranks runs, in order.
BEGIN, MAIN = "splitc.runtime.processes.begin", "splitc.runtime.processes.rank"
# OpenBLAS, numpy's, would start a thread for each core, whatever a container allows. Ranks do not use it.
THREADLESS = {"OPENBLAS_NUM_THREADS": "1"}
# Seconds that processes get to end which were killed, or have closed their connections. A choice: half of the 10 s in
# which an error is promised. One that its GPU keeps from ending is not waited for longer.
ENDING = 5.0


class DeviceProcess:
    """The process of a device, with this process's import path, whatever the caller's main module is.

    `number` is its number among the processes that sessions share. Raises PackageError for a GPU that this process
    can't see.
    """

    def __init__(self, device: Device, number: int) -> None:
        self.number = number
        environment = {**THREADLESS, **os.environ, **visible(device, os.environ)}
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours.detach(), pack, unpack)
        self._began = time.monotonic()
        pulse = create_memory(8)
        try:
            self._pulse = map_memory(os.dup(pulse)).view(np.float64)
            control = theirs.fileno()
            beginning = f"{control}, {pulse}, {os.getpid()}, {device.kind == 'cuda'}"
            imports = f"from {BEGIN} import begin; begin({beginning}); from {MAIN} import main"
            with _without_interrupts():
                self._process = subprocess.Popen(
                    python_command(imports, f"main({control})"),
                    stdin=subprocess.DEVNULL,
                    pass_fds=[control, pulse],
                    env=environment,
                )
        finally:
            theirs.close()
            os.close(pulse)
        self.pid = self._process.pid
        # Ranks that have not ended; whether there will be no more.
        self._ranks: set[Channel] = set()
        self._sealed = False
        # Why the caller has ended it.
        self._why: BaseException | None = None

    def host(self, start: Start, descriptors: Sequence[int]) -> Channel:
        """Start a rank, which begins to load its engines. Returns the channel to it.

        If the process is gone, the channel's other end is closed. Raises EngineError if the start can't be sent for
        another reason, such as too many descriptors in flight.
        """
        ours, theirs = socket.socketpair()
        made = Channel(ours.detach(), pack, unpack)
        with theirs:
            try:
                self._channel.send(start, theirs.fileno(), *descriptors)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the process is gone, which the rank's reader says
            except OSError as error:
                made.close()
                name = f"rank {start.number} ({start.devices[start.number]})"
                raise EngineError(f"{name} could not be started in its process: {error}") from error
        self._ranks.add(made)
        return made

    def leave(self, rank: Channel) -> None:
        """Record that the rank with this channel has ended."""
        self._ranks.discard(rank)

    def seal(self) -> None:
        """Accept no more ranks: the process ends with its last one."""
        if not self._sealed:
            self._sealed = True
            with contextlib.suppress(OSError):
                self._channel.send(None)

    @property
    def last_beat(self) -> tuple[float, bool]:
        """The time of its last heartbeat, by time.monotonic, or of its start; and whether there was a heartbeat."""
        return float(self._pulse[0]) or self._began, bool(self._pulse[0])

    def kill(self, why: BaseException) -> set[str]:
        """End it at once. Returns the files that NCCL leaves behind."""
        if self._process.poll() is not None:
            return set()
        files = find_mapped(self.pid, NCCL)
        self._why = self._why or why
        self._process.kill()
        return files

    def wait(self, patience: float) -> None:
        """Wait until it has ended, for at most `patience` seconds: a GPU that hangs may keep it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        self._close()

    def join(self, patience: float) -> bool:
        """Wait `patience` seconds for its end, if its last rank has ended. Returns whether it has ended."""
        if not self._sealed or self._ranks:
            return True  # it goes on
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            return False
        self._close()
        return True

    def _close(self) -> None:
        """Close the connections to it. The time of its last heartbeat is kept."""
        self._channel.close()
        self._pulse = self._pulse.copy()

    def how_it_ended(self) -> str:
        """How it ended, in words. Waits for the end."""
        try:
            code = self._process.wait(ENDING)
        except subprocess.TimeoutExpired:
            return f"has closed its connection, and has not ended for {ENDING:.0f} s"
        if self._why is not None:
            return f"was ended because ranks of another model in it broke: {self._why}"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Block SIGINT, also in processes that the block starts: a terminal sends it to all, and they let it in when they
    ignore it (`begin`). Until then Python would end them, with a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class DeviceProcesses:
    """The processes of one session, or of several that share them: one for each device.

    `devices` are those of all these sessions, `sessions` numbers them.
    """

    def __init__(self, devices: Iterable[Device] = ()) -> None:
        self.devices = tuple(dict.fromkeys(devices))
        self.sessions = itertools.count()
        self._connected: set[tuple[int, int]] = set()
        self._processes: dict[Device, DeviceProcess] = {}
        self._starting = threading.Lock()

    def find(self, device: Device) -> DeviceProcess:
        """The process of a device, which is started if there is none. Raises PackageError as DeviceProcess does."""
        with self._starting:
            if device not in self._processes:
                self._processes[device] = DeviceProcess(device, len(self._processes))
            return self._processes[device]

    def connect_anew(self, pairs: Set[tuple[int, int]]) -> set[tuple[int, int]]:
        """Mark these pairs of processes, lower number first, as connected. Returns those that were not."""
        new = set(pairs - self._connected)
        self._connected |= new
        return new

    def running(self, devices: Iterable[Device]) -> list[DeviceProcess]:
        """The started processes of these devices."""
        return [self._processes[device] for device in dict.fromkeys(devices) if device in self._processes]

    def seal(self) -> None:
        """Accept no more ranks: each process ends with its last one."""
        for process in self._processes.values():
            process.seal()


def kill(processes: Iterable[DeviceProcess], why: BaseException, files: Iterable[str] = ()) -> None:
    """End processes at once, and remove what NCCL leaves behind: these files, and others that are found."""
    each_once = list(dict.fromkeys(processes))
    left = set(files).union(*(process.kill(why) for process in each_once))
    end = time.monotonic() + ENDING
    for process in each_once:
        process.wait(max(0.0, end - time.monotonic()))
    remove_files(left)


def visible(device: Device, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with which a process sees this GPU alone. Raises PackageError if this process does not see it."""
    if device.kind == "cpu":
        return {}
    seen = environment.get("CUDA_VISIBLE_DEVICES")
    names = None if seen is None else [name.strip() for name in seen.split(",") if name.strip()]
    if names is not None and device.index >= len(names):
        raise PackageError(f"there is no {device}: CUDA_VISIBLE_DEVICES names {len(names)} GPUs")
    return {"CUDA_VISIBLE_DEVICES": str(device.index) if names is None else names[device.index]}
