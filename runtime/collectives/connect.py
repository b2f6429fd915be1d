"""Choose the collectives for a session's devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitc.runtime.collectives import Collectives
from splitc.runtime.devices import Device
from splitc.runtime.engines import Backend
from splitc.runtime.entries import load_entry


@dataclass(frozen=True)
class Connection:
    """A way to connect ranks on these kinds of devices.

    `connect` names a function that takes the ranks' devices and backends, and returns one end for each rank.
    """

    devices: frozenset[str]
    connect: str


# The first one that supports all of the devices is used.
CONNECTIONS = (
    # Ranks that are threads: values are passed on as they are.
    Connection(frozenset({"cpu"}), "splitc.runtime.collectives.host:connect_devices"),
    # Ranks that are threads: values are copied from, to and between GPUs. Their engines are connected by NCCL.
    Connection(frozenset({"cpu", "cuda"}), "splitc.runtime.collectives.gpu_collectives:connect_devices"),
)


def connect_devices(devices: Sequence[Device], backends: Sequence[Backend]) -> Sequence[Collectives]:
    """One end for each rank, of the first connection that supports the devices."""
    kinds = {device.kind for device in devices}
    way = next(way for way in CONNECTIONS if kinds <= way.devices)
    ends: Sequence[Collectives] = load_entry(way.connect)(devices, backends)
    return ends
