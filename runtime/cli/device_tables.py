"""Show devices, and their measurements, on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from splitc.runtime.cli.terminal import out, table
from splitc.runtime.hardware.devices import DeviceStatus
from splitc.runtime.hardware.gpus import INSTALL, find_cupy
from splitc.runtime.hardware.machine import Machine
from splitc.runtime.units import format_bytes, format_seconds


def print_devices(devices: Sequence[DeviceStatus]) -> None:
    """Print the devices of this machine, and how GPUs copy to each other."""
    rows = table("device", "what", "capability", "memory", "free", "copies", right=("memory", "free"))
    for device in devices:
        sizes = map(format_bytes, (device.total_bytes, device.free_bytes))
        copies = ", ".join(f"{other} {how}" for other, how in device.peers.items())
        rows.add_row(device.name, device.description, device.compute_capability or "", *sizes, copies)
    out.print(rows)
    if not find_cupy():
        out.print(f"GPUs are not listed. {INSTALL}.")


def print_links(machine: Machine) -> None:
    """Print the measurements of each pair of devices."""
    sizes = [format_bytes(timing.bytes) for timing in next(iter(machine.measured.values()))]
    rows = table("measured", "", *sizes, right=sizes)
    for name, timings in machine.measured.items():
        rows.add_row(name, "copy", *(format_seconds(timing.copy) for timing in timings))
        rows.add_row("", "sum", *(format_seconds(timing.reduce) for timing in timings))
    out.print(rows)


def print_speeds(machine: Machine) -> None:
    """Print the measured speed of each device."""
    rows = table("measured", "floating point operations", "memory", right=("floating point operations", "memory"))
    for name, speed in machine.speeds.items():
        flops = "" if speed.flops is None else f"{speed.flops / 1e12:.3g} TFLOP/s"
        rows.add_row(name, flops, "" if speed.bytes is None else f"{speed.bytes / 1e9:.3g} GB/s")
    out.print(rows)
