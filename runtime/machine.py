"""What is known of a machine: how fast its devices are, and how fast values get from one to another."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from splitc.runtime.cache import read_cache, write_cache
from splitc.runtime.device_profiles import MIXED_COPY, MIXED_SUM, Link, find_profile
from splitc.runtime.devices import Device

# Where what was measured is kept.
FILE = "machine.json"


class MeasuredLink(Struct, frozen=True):
    """One size as it was measured, in seconds: to copy a value from one device to the other, and to sum over both."""

    bytes: int
    copy: float
    reduce: float


class MeasuredSpeed(Struct, frozen=True):
    """What a device was measured to do in a second: floating point operations, and bytes that it reads or writes.

    All cores of a CPU together compute in float32, a GPU in float16. None where it could not be measured.
    """

    flops: float | None = None
    bytes: float | None = None


class Machine(Struct, frozen=True):
    """What was measured of pairs of devices, named `cpu-cpu` or `cuda0-cuda1`, and of devices, named `cpu` or `cuda0`.

    `copies` and `sums` are lines through what is `measured`.
    """

    copies: dict[str, Link] = {}
    sums: dict[str, Link] = {}
    measured: dict[str, list[MeasuredLink]] = {}
    speeds: dict[str, MeasuredSpeed] = {}

    def copy(self, one: Device, other: Device) -> Link:
        """The link from one device to another; that of the devices' profiles where it was not measured."""
        return self.copies.get(pair_name(one, other)) or typical_copy(one, other)

    def sum(self, one: Device, other: Device) -> Link:
        """The sum over two devices; that of the devices' profiles where it was not measured."""
        return self.sums.get(pair_name(one, other)) or typical_sum(one, other)

    def speed(self, device: Device) -> MeasuredSpeed:
        """What was measured of a device; nothing where it was not."""
        return self.speeds.get(link_end(device), MeasuredSpeed())


def typical_copy(one: Device, other: Device) -> Link:
    """The link from one device to another as it is on most machines."""
    return find_profile(one.kind).copy if one.kind == other.kind else MIXED_COPY


def typical_sum(one: Device, other: Device) -> Link:
    """The sum over two devices as it is on most machines."""
    return find_profile(one.kind).sum if one.kind == other.kind else MIXED_SUM


def link_end(device: Device) -> str:
    """The name of a device as the end of a link: all CPU devices are alike."""
    return "cpu" if device.kind == "cpu" else str(device)


def pair_name(one: Device, other: Device) -> str:
    """The name of two devices, in either order."""
    return "-".join(sorted(map(link_end, (one, other))))


def known_machine() -> Machine:
    """What `splitc devices --measure` found on this machine; nothing where it never ran."""
    try:
        return msgspec.json.decode(read_cache(FILE), type=Machine)
    except msgspec.DecodeError:
        return Machine()


def keep_machine(machine: Machine) -> None:
    """Keep what was measured for later runs. Raises MisuseError where it can't be written."""
    write_cache(FILE, msgspec.json.format(msgspec.json.encode(machine), indent=2) + b"\n")
