"""Start the processes of ranks."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path

import numpy as np

from splitc.runtime.arrays import Array
from splitc.runtime.channel import Channel
from splitc.runtime.child_python import python_command
from splitc.runtime.collectives.engine_meeting import shared_bytes
from splitc.runtime.devices import Device, cores
from splitc.runtime.engines.kinds import find_kind
from splitc.runtime.errors import PackageError
from splitc.runtime.manifest import Manifest, State
from splitc.runtime.processes.messages import Start, pack, unpack
from splitc.runtime.shared_memory import create_memory, map_memory

# What a rank's process runs, the beginning first.
BEGIN, MAIN = "splitc.runtime.processes.begin", "splitc.runtime.processes.rank"
# Seconds that a rank looks for its next request before it sleeps, where it may.
SPIN = 2e-3


@dataclass
class Launched:
    """Processes, the channels to them, and when each last gave a sign of life (by time.monotonic; 0 before the first).

    `spins` says whether each process, the caller's included, has a core that nobody else needs.
    """

    pulse: Array
    spins: bool
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    channels: list[Channel] = field(default_factory=list)


def launch(
    package: Path,
    manifest: Manifest,
    devices: Sequence[Device],
    states: Sequence[State],
    threads: int,
    cuda_graphs: bool,
    in_flight: int,
) -> Launched:
    """Start a process for each rank, which begins to load its engines.

    Raises PackageError for a GPU that this process can't see. Then none is left.
    """
    with ExitStack() as ours:
        ends = {pair: _socket_pair(ours) for pair in combinations(range(len(devices)), 2)}
        meetings = {group: _memory(ours, shared_bytes(len(group))) for group in find_groups(manifest)}
        pulse = _memory(ours, 8 * len(devices))
        made = Launched(map_memory(os.dup(pulse)).view(np.float64), has_spare_cores(devices))
        try:
            for rank, device in enumerate(devices):
                start = Start(
                    package=package.absolute(),
                    number=rank,
                    devices=tuple(map(_seen_alone, devices)),
                    states=tuple(states),
                    threads=threads,
                    cuda_graphs=cuda_graphs,
                    in_flight=in_flight,
                    channels={
                        b if rank == a else a: both[rank == b] for (a, b), both in ends.items() if rank in (a, b)
                    },
                    meetings={group: memory for group, memory in meetings.items() if rank in group},
                    spin=SPIN if made.spins else 0.0,
                )
                _start(made, device, start, pulse)
        except BaseException:
            for process in made.processes:
                process.kill()
                process.wait()
            for channel in made.channels:
                channel.close()
            raise
    return made


def _socket_pair(stack: ExitStack) -> tuple[int, int]:
    """The descriptors of both ends of a socket, which the stack closes."""
    one, other = map(stack.enter_context, socket.socketpair())
    return one.fileno(), other.fileno()


def _memory(stack: ExitStack, size: int) -> int:
    """The descriptor of new memory, which the stack closes."""
    descriptor = create_memory(size)
    stack.callback(os.close, descriptor)
    return descriptor


def _start(made: Launched, device: Device, start: Start, pulse: int) -> None:
    """Start a rank's process, with this process's import path, whatever the caller's main module is."""
    ours, theirs = socket.socketpair()
    made.channels.append(Channel(ours.detach(), pack, unpack))
    with theirs:
        control = theirs.fileno()
        beginning = f"{control}, {pulse}, {start.number}, {os.getpid()}, {device.kind == 'cuda'}"
        program = f"from {BEGIN} import begin; begin({beginning}); from {MAIN} import main; main({control})"
        made.processes.append(
            subprocess.Popen(
                python_command(program),
                stdin=subprocess.DEVNULL,
                pass_fds=[control, pulse, *start.channels.values(), *start.meetings.values()],
                env={**os.environ, **visible(device, os.environ)},
            )
        )
    made.channels[-1].send(start)


def has_spare_cores(devices: Sequence[Device]) -> bool:
    """Whether a process may look for messages without a pause. The threads of CPU devices take all cores."""
    return all(device.kind == "cuda" for device in devices) and cores() > len(devices)


def find_groups(manifest: Manifest) -> set[tuple[int, ...]]:
    """The groups of ranks whose engines meet: to exchange values or, on GPUs, to agree on what NCCL does."""
    if not find_kind(manifest.engine).uses_operators:
        return set()
    files = [file for rank in manifest.ranks for file in rank.engines if file.group]
    return {tuple(file.group) for file in files}


def _seen_alone(device: Device) -> Device:
    """The device as its rank's process sees it: a GPU is the only one there."""
    return device if device.kind == "cpu" else replace(device, ordinal=0)


def visible(device: Device, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that let a process see this GPU alone. Raises PackageError if it is none that this one sees."""
    if device.kind == "cpu":
        return {}
    seen = environment.get("CUDA_VISIBLE_DEVICES")
    names = None if seen is None else [name.strip() for name in seen.split(",") if name.strip()]
    if names is not None and device.index >= len(names):
        raise PackageError(f"there is no {device}: CUDA_VISIBLE_DEVICES names {len(names)} GPUs")
    return {"CUDA_VISIBLE_DEVICES": str(device.index) if names is None else names[device.index]}
