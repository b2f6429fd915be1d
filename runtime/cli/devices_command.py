"""The command devices."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import typer

from splitc.runtime.cli.bars import shown_bars
from splitc.runtime.cli.shared_options import JSON
from splitc.runtime.cli.terminal import out, print_json, print_table
from splitc.runtime.hardware.devices import DeviceStatus, list_devices, parse_devices
from splitc.runtime.hardware.gpus import INSTALL, find_cupy
from splitc.runtime.hardware.machine import Machine, keep_machine, known_machine
from splitc.runtime.mpi.first_process import begin
from splitc.runtime.units import format_bytes, format_seconds


def devices(
    measure: bool = typer.Option(
        False,
        "--measure",
        help="Measure copies and sums between each pair, and the speed of each device, for the planner. Under mpirun "
        "also copies between hosts.",
    ),
    as_json: bool = JSON,
) -> None:
    """List the devices of this machine, with their memory."""
    present = list_devices()
    gpus = [device.name for device in present if device.name.startswith("cuda")]
    machine = _measure(gpus) if measure else known_machine()
    if as_json:
        print_json(machine if measure else present)
    else:
        _print_devices(present)
        if machine.measured:
            _print_links(machine)
        if machine.speeds:
            _print_speeds(machine)
        if machine.interconnect is not None:
            out.print(f"between hosts: {machine.interconnect} (--interconnect {machine.interconnect.option})")
    if measure:  # last, since this may fail for lack of a writable folder
        keep_machine(machine)


def _measure(gpus: Sequence[str]) -> Machine:
    """The devices of this machine, and the link to another host if MPI has started a process there."""
    from splitc.runtime.tools.host_links import measure_hosts
    from splitc.runtime.tools.link_times import measure_machine

    before, world = known_machine(), begin()
    between = None if world is None else measure_hosts(world)
    with shown_bars():
        machine = measure_machine(parse_devices(["cpu0", "cpu1", *gpus]))
    return msgspec.structs.replace(machine, interconnect=between or before.interconnect)


def _print_devices(devices: Sequence[DeviceStatus]) -> None:
    """Print the devices of this machine, and how its GPUs copy to each other."""
    rows = []
    for device in devices:
        sizes = map(format_bytes, (device.total_bytes, device.free_bytes))
        copies = ", ".join(f"{other} {how}" for other, how in device.peers.items())
        rows.append([device.name, device.description, device.compute_capability or "", *sizes, copies])
    print_table(("device", "what", "capability", "memory", "free", "copies"), rows, right=("memory", "free"))
    if not find_cupy():
        out.print(f"GPUs are not listed. {INSTALL}.")


def _print_links(machine: Machine) -> None:
    """Print the measurements of each pair of devices."""
    sizes = [format_bytes(timing.bytes) for timing in next(iter(machine.measured.values()))]
    rows = []
    for name, timings in machine.measured.items():
        rows.append([name, "copy", *(format_seconds(timing.copy) for timing in timings)])
        rows.append(["", "sum", *(format_seconds(timing.reduce) for timing in timings)])
    print_table(("measured", "", *sizes), rows, right=sizes)


def _print_speeds(machine: Machine) -> None:
    """Print the measured speed of each device."""
    numbers = ("floating point operations", "memory", "by all cores")
    rows = []
    for name, speed in machine.speeds.items():
        flops = "" if speed.flops is None else f"{speed.flops / 1e12:.3g} TFLOP/s"
        memory = ("" if rate is None else f"{rate / 1e9:.3g} GB/s" for rate in (speed.bytes, speed.together))
        rows.append([name, flops, *memory])
    print_table(("measured", *numbers), rows, right=numbers)
