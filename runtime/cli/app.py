"""The command line: its own options, and its commands, each of which is imported when it is wanted."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import typer

from splitc.runtime.cli.options import Command
from splitc.runtime.cli.terminal import Commands, out
from splitc.runtime.version import VERSION

# Where each command is in splitc, in the order of the help. The compiler's may be missing.
COMMANDS = {
    "devices": "runtime.cli.devices_command:devices",
    "run": "runtime.cli.run_commands:run",
    "check": "runtime.cli.check_command:check",
    "bench": "runtime.cli.run_commands:bench_command",
    "generate": "runtime.cli.generate_command:generate_command",
    "inspect": "runtime.cli.inspect_command:inspect",
    "help": "runtime.cli.help_command:help_command",
    "export": "runtime.cli.export_command:export",
    "plan": "compiler.cli:plan",
    "compile": "compiler.cli:compile_command",
    "build": "compiler.cli:build_command",
}

app = typer.Typer(
    name="splitc",
    cls=Commands,
    help="Split one ONNX model over several devices, offline, and run the ranks as one model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def add_commands(wanted: str | None = None) -> None:
    """Add one command to the app; or, if there is none of this name, all that are installed."""
    for name in [wanted] if wanted in COMMANDS else COMMANDS:
        place, function = COMMANDS[name].split(":")
        module = f"splitc.{place}"
        if find_spec(module.rpartition(".")[0]) is not None:
            app.command(name, cls=Command)(getattr(import_module(module), function))


def _version(show: bool) -> None:
    if show:
        out.print(f"splitc {VERSION}")
        raise typer.Exit


def _list_devices(show: bool) -> None:
    if show:
        from splitc.runtime.cli.devices_command import devices

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
