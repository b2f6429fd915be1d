"""Peer access between GPUs, and whether copies between them are correct."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from splitc.runtime.engines.gpu_device import GpuDevice

# cudaErrorPeerAccessAlreadyEnabled, by another session of this process.
ALREADY = 704
# A pattern that differs from any incomplete copy of it.
PATTERN = (np.arange(1 << 20, dtype=np.uint32) * np.uint32(2654435761)).view(np.uint8)


def enable_peer_access(gpus: Mapping[int, GpuDevice]) -> frozenset[tuple[int, int]]:
    """Give each GPU access to the others' memory where that is possible. Elsewhere the driver copies through the host.

    Returns the pairs of which the first has access to the second's memory. Must be called before `check_copies`.
    """
    links = set()
    for one, gpu in gpus.items():
        gpu.attach()
        runtime = gpu.cuda.runtime
        for other in gpus:
            if other != one and runtime.deviceCanAccessPeer(one, other):
                links.add((one, other))
                try:
                    runtime.deviceEnablePeerAccess(other)
                except runtime.CUDARuntimeError as error:
                    if error.status != ALREADY:
                        raise
    return frozenset(links)


def check_copies(gpus: Mapping[int, GpuDevice]) -> frozenset[tuple[int, int]]:
    """The pairs of GPUs (source, target) whose copies are wrong, as on some machines. Copies one array for each pair.

    Must be called before the ranks' threads start.
    """
    wrong = set()
    for source in gpus:
        gpus[source].attach()
        value = gpus[source].upload(PATTERN)
        gpus[source].wait_all()
        for target in gpus:
            if target != source:
                gpus[target].attach()
                arrived = gpus[target].download({"": gpus[target].copy_from(value, source)})[""]
                if not np.array_equal(arrived, PATTERN):
                    wrong.add((source, target))
    return frozenset(wrong)
