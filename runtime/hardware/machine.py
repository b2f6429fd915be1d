"""Measurements of a machine: the speeds of its devices and of the links between them."""

from __future__ import annotations

import msgspec
from msgspec import Struct
from msgspec.json import Decoder

from splitc.runtime.files.cache import read_cache, write_cache
from splitc.runtime.files.written import indented
from splitc.runtime.hardware.devices import Device, memory_of
from splitc.runtime.hardware.profiles import INTERCONNECT, MIXED_COPY, MIXED_SUM, PROFILES, Link

# The cache's file of measurements.
FILE = "machine.json"


class MeasuredLink(Struct, frozen=True):
    """Measured seconds for one size: to copy a value from one device to the other, and to sum over both."""

    bytes: int
    copy: float
    reduce: float


class MeasuredSpeed(Struct, frozen=True):
    """A device's measured floating point operations per second, and bytes read or written per second.

    For a GPU the operations are in float16. For a CPU they are in float32 and of all cores together, the bytes are of
    one core, `cached` are those that it reads or writes in its cache, and `together` those that all cores read at the
    same time. None if they can't be measured.
    """

    flops: float | None = None
    bytes: float | None = None
    cached: float | None = None
    together: float | None = None


class Machine(Struct, frozen=True):
    """Measurements of pairs of devices, named `cpu-cpu` or `cuda0-cuda1`, and of devices, named `cpu` or `cuda0`.

    `copies` and `sums` are lines fitted to `measured`. `interconnect` is a link between two devices of different hosts.
    Devices of all hosts are assumed to be like those of this machine.
    """

    copies: dict[str, Link] = {}
    sums: dict[str, Link] = {}
    measured: dict[str, list[MeasuredLink]] = {}
    speeds: dict[str, MeasuredSpeed] = {}
    interconnect: Link | None = None

    def copy(self, one: Device, other: Device) -> Link:
        """The time of a copy between two devices: measured, or else from the devices' profiles."""
        if one.host != other.host:
            return self.between_hosts(one, other)
        return self.copies.get(pair_name(one, other)) or typical_copy(one, other)

    def between_hosts(self, one: Device, other: Device) -> Link:
        """The time of a copy between two devices of different hosts: measured, or else a typical one.

        The typical one is no faster than between such devices of one host.
        """
        if self.interconnect is not None:
            return self.interconnect
        inside = typical_copy(one, other)
        return Link(max(INTERCONNECT.latency, inside.latency), max(INTERCONNECT.per_byte, inside.per_byte))

    def sum(self, one: Device, other: Device) -> Link:
        """The time of a sum over two devices of a host: measured, or else from the devices' profiles."""
        typical = PROFILES[one.kind].sum if one.kind == other.kind else MIXED_SUM
        return self.sums.get(pair_name(one, other)) or typical

    def speed(self, device: Device) -> MeasuredSpeed:
        """The measured speed of a device; an empty one if it was not measured."""
        return self.speeds.get(link_end(device), MeasuredSpeed())


def typical_copy(one: Device, other: Device) -> Link:
    """The typical time of a copy between two devices, from their profiles."""
    return PROFILES[one.kind].copy if one.kind == other.kind else MIXED_COPY


def link_end(device: Device) -> str:
    """The name of a device as the end of a link, on whatever host: `cpu` for all CPU devices."""
    return memory_of(device.local)


def pair_name(one: Device, other: Device) -> str:
    """The name of two devices, in either order."""
    return "-".join(sorted(map(link_end, (one, other))))


_MACHINES = Decoder(Machine)


def known_machine() -> Machine:
    """The results of `splitc devices --measure` on this machine; empty if it never ran."""
    try:
        return _MACHINES.decode(read_cache(FILE))
    except msgspec.DecodeError:
        return Machine()


def keep_machine(machine: Machine) -> None:
    """Store measurements for later runs. Raises MisuseError if they can't be written."""
    write_cache(FILE, indented(machine))
