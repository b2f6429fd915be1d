"""The command line of the runtime: its own options, and its commands in the order of the help."""

from __future__ import annotations

import typer

from splitc.runtime.cli.devices_command import devices
from splitc.runtime.cli.generate_command import generate_command
from splitc.runtime.cli.inspect_command import inspect
from splitc.runtime.cli.options import Command
from splitc.runtime.cli.run_commands import bench_command, check, run
from splitc.runtime.cli.terminal import Commands, out
from splitc.runtime.version import VERSION

app = typer.Typer(
    name="splitc",
    cls=Commands,
    help="Split one ONNX model over several devices, offline, and run the ranks as one model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("devices", cls=Command)(devices)
app.command("run", cls=Command)(run)
app.command("check", cls=Command)(check)
app.command("bench", cls=Command)(bench_command)
app.command("generate", cls=Command)(generate_command)
app.command("inspect", cls=Command)(inspect)


def _version(show: bool) -> None:
    if show:
        out.print(f"splitc {VERSION}")
        raise typer.Exit


def _list_devices(show: bool) -> None:
    if show:
        devices(measure=False, as_json=False)
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    listing: bool = typer.Option(
        False, "--list-devices", callback=_list_devices, is_eager=True, help="The same as the command devices."
    ),
) -> None:
    """Options of the program itself."""
