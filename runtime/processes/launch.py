"""Start the ranks of a session in the processes of their devices."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path

from splitc.runtime.channel import Channel
from splitc.runtime.collectives.engine_meeting import shared_bytes
from splitc.runtime.devices import Device, cores
from splitc.runtime.engines.kinds import find_kind, has_gpu_each
from splitc.runtime.engines.weight_places import SwapRoom
from splitc.runtime.manifest import Manifest, State
from splitc.runtime.processes.device_processes import DeviceProcess, DeviceProcesses, kill
from splitc.runtime.processes.messages import Start
from splitc.runtime.shared_memory import create_memory

# Seconds that a rank looks for its next request before it sleeps, where it may.
SPIN = 2e-3


@dataclass
class Launched:
    """The process of each rank, and the channels to the ranks.

    `spins` says whether each process, the caller's included, has a core that nobody else needs.
    """

    spins: bool
    processes: list[DeviceProcess] = field(default_factory=list)
    channels: list[Channel] = field(default_factory=list)


def launch(
    package: Path,
    manifest: Manifest,
    devices: Sequence[Device],
    states: Sequence[State],
    threads: int,
    cuda_graphs: bool,
    in_flight: int,
    processes: DeviceProcesses,
    turns: Sequence[SwapRoom | None],
) -> Launched:
    """Start each rank in the process of its device, where it begins to load its engines. For `turns` see Worker.

    Raises PackageError for a GPU that this process can't see, EngineError for a rank that can't be told to start. Then
    none of these processes is left.
    """
    made = Launched(has_spare_cores(devices))
    with ExitStack() as ours:
        ends = {pair: _socket_pair(ours) for pair in combinations(range(len(devices)), 2)}
        meetings = {group: _memory(ours, shared_bytes(len(group))) for group in find_groups(manifest)}
        try:
            made.processes.extend(map(processes.find, devices))
            for rank, process in enumerate(made.processes):
                channels = {b if rank == a else a: both[rank == b] for (a, b), both in ends.items() if rank in (a, b)}
                own = {group: memory for group, memory in meetings.items() if rank in group}
                start = Start(
                    package=package.absolute(),
                    number=rank,
                    devices=tuple(map(_seen_alone, devices)),
                    states=tuple(states),
                    threads=threads,
                    cuda_graphs=cuda_graphs,
                    in_flight=in_flight,
                    channels=tuple(channels),
                    meetings=tuple(own),
                    by_nccl=has_gpu_each(devices),
                    spin=SPIN if made.spins else 0.0,
                    turns=turns[rank],
                )
                made.channels.append(process.host(start, [*channels.values(), *own.values()]))
        except BaseException as error:
            kill(processes.running(devices), error)
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
