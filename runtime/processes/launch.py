"""Start the ranks of a session in the processes of their devices."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import combinations

from splitc.runtime.collectives.meeting import shared_bytes
from splitc.runtime.engines.kinds import find_kind, has_gpu_each
from splitc.runtime.gpu.weight_places import SwapBuffer
from splitc.runtime.hardware.devices import Device, cores
from splitc.runtime.ipc.channel import Channel
from splitc.runtime.ipc.shared_memory import create_memory
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.package.steps import Reduce, Send
from splitc.runtime.processes.device_processes import DeviceProcess, DeviceProcesses, kill
from splitc.runtime.processes.messages import Start
from splitc.runtime.ranks.deployment import Deployment

# Seconds that a rank busy-waits for its next request before it sleeps, where it may: on GPUs, with cores to spare. A
# choice: more than a caller takes between two tokens. After a longer pause a request waits for the rank to wake.
SPIN = 2e-3


@dataclass
class Launched:
    """The process of each rank, and the channels to the ranks.

    `spins` says whether each process, the caller's included, has a core to itself.
    """

    spins: bool
    processes: list[DeviceProcess] = field(default_factory=list)
    channels: list[Channel] = field(default_factory=list)


def launch(deployment: Deployment, processes: DeviceProcesses, swap: Mapping[Device, SwapBuffer]) -> Launched:
    """Start each rank in the process of its device, where it begins to load its engines. For `swap` see Setup.

    Raises PackageError for a GPU that this process can't see, EngineError if a rank's start can't be sent. Then all
    these processes are ended.
    """
    manifest, devices = deployment.manifest, deployment.devices
    made, session = Launched(has_spare_cores(deployment.all_devices)), next(processes.sessions)
    with ExitStack() as ours:
        meetings = {group: _memory(ours, shared_bytes(len(group))) for group in find_groups(manifest)}
        try:
            made.processes.extend(map(processes.find, devices))
            hosts = [process.number for process in made.processes]
            sockets = _Sockets(processes.connect_anew(_between(hosts, find_pairs(manifest, devices))), ours)
            for rank, process in enumerate(made.processes):
                peers = sockets.open(process.number)
                own = {group: memory for group, memory in meetings.items() if rank in group}
                start = Start(
                    session=session,
                    package=deployment.package.absolute(),
                    number=rank,
                    hosts=tuple(hosts),
                    devices=tuple(map(_seen_alone, devices)),
                    threads=deployment.threads,
                    cuda_graphs=deployment.cuda_graphs,
                    peers=tuple(peers),
                    meetings=tuple(own),
                    by_nccl=has_gpu_each(devices),
                    spin=SPIN if made.spins else 0.0,
                    swap=swap.get(devices[rank]),
                    share=deployment.shares[rank],
                )
                descriptors = [*(peer.fileno() for peer in peers.values()), *own.values()]
                made.channels.append(process.host(start, descriptors))
                for peer in peers.values():
                    peer.close()
        except BaseException as error:
            kill(processes.running(devices), error)
            for channel in made.channels:
                channel.close()
            raise
    return made


def _between(hosts: Sequence[int], pairs: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    """The pairs of processes, lower number first, that host these pairs of ranks."""
    processes = {(hosts[one], hosts[other]) for one, other in pairs}
    return {(min(pair), max(pair)) for pair in processes if len(set(pair)) > 1}


class _Sockets:
    """A socket for each pair of processes, made when the first of them gets its rank: all at once may be too many.

    The stack closes sockets that were not used.
    """

    def __init__(self, pairs: Iterable[tuple[int, int]], stack: ExitStack) -> None:
        self._peers: dict[int, set[int]] = {}
        for one, other in pairs:
            self._peers.setdefault(one, set()).add(other)
            self._peers.setdefault(other, set()).add(one)
        self._stack = stack
        # The ends that wait for a process, by the numbers of the others.
        self._waiting: dict[int, dict[int, socket.socket]] = {}

    def open(self, process: int) -> dict[int, socket.socket]:
        """The ends of a process, by the numbers of the others, when its first rank starts."""
        ends = self._waiting.pop(process, {})
        for other in self._peers.pop(process, set()) - ends.keys():
            ends[other], theirs = map(self._stack.enter_context, socket.socketpair())
            self._waiting.setdefault(other, {})[process] = theirs
        return ends


def _memory(stack: ExitStack, size: int) -> int:
    """The descriptor of new memory, which the stack closes."""
    descriptor = create_memory(size)
    stack.callback(os.close, descriptor)
    return descriptor


def has_spare_cores(devices: Sequence[Device]) -> bool:
    """Whether processes may busy-wait for messages. The threads of CPU devices take all cores."""
    return all(device.kind == "cuda" for device in devices) and cores() > len(devices)


def find_groups(manifest: Manifest) -> set[tuple[int, ...]]:
    """The groups of ranks whose engines meet: to exchange values, or to agree on NCCL's transfers."""
    if not find_kind(manifest.engine).uses_operators:
        return set()
    return {tuple(file.group) for file in manifest.engines if file.group}


def find_pairs(manifest: Manifest, devices: Sequence[Device]) -> set[tuple[int, int]]:
    """The pairs of ranks to connect, lower number first.

    With GPUs, all agree with all on what to capture.
    """
    ranks = range(len(devices))
    if any(device.kind != "cpu" for device in devices):
        return set(combinations(ranks, 2))
    pairs: set[tuple[int, int]] = set()
    for number, rank in enumerate(manifest.ranks):
        for step in rank.program:
            if isinstance(step, Send):
                pairs.add((min(number, step.target), max(number, step.target)))
            elif isinstance(step, Reduce):
                pairs.update(combinations(sorted(step.ranks), 2))
    return pairs


def _seen_alone(device: Device) -> Device:
    """The device as its rank's process sees it: a GPU is the only one there."""
    return device if device.kind == "cpu" else replace(device, ordinal=0)
