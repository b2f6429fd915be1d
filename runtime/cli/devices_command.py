"""The command devices."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import typer

from splitc.runtime.cli.bars import shown_bars
from splitc.runtime.cli.device_tables import print_devices, print_links, print_speeds
from splitc.runtime.cli.shared_options import JSON
from splitc.runtime.cli.terminal import out, print_json
from splitc.runtime.hardware.devices import list_devices, parse_devices
from splitc.runtime.hardware.machine import Machine, keep_machine, known_machine
from splitc.runtime.mpi.first_process import begin


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
        print_devices(present)
        if machine.measured:
            print_links(machine)
        if machine.speeds:
            print_speeds(machine)
        if machine.interconnect is not None:
            out.print(f"between hosts: {machine.interconnect} (--interconnect {machine.interconnect.option})")
    if measure:  # after all that can be said without a place to keep it
        keep_machine(machine)


def _measure(gpus: Sequence[str]) -> Machine:
    """The devices of this machine, and the link to another host, where MPI has started a process there."""
    from splitc.runtime.tools.host_links import measure_hosts
    from splitc.runtime.tools.link_times import measure_machine

    before, world = known_machine(), begin()
    between = None if world is None else measure_hosts(world)
    with shown_bars():
        machine = measure_machine(parse_devices(["cpu0", "cpu1", *gpus]))
    return msgspec.structs.replace(machine, interconnect=between or before.interconnect)
