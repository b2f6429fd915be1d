"""The command line: its own options, and its commands, each imported when it is called."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import typer
from typer.core import TyperCommand

from splitc.runtime.cli.help import print_program_help
from splitc.runtime.cli.options import Command
from splitc.runtime.cli.terminal import Commands, out
from splitc.runtime.version import VERSION


@dataclass(frozen=True)
class Place:
    """A command's place in splitc: its module, its topic, and a line on what it does."""

    function: str
    topic: str
    line: str


# In the order of the help, which imports none of them. The compiler's may be missing.
COMMANDS = {
    "plan": Place("compiler.cli.commands:plan", "Compile", "Show what each device would hold, against its budget."),
    "compile": Place(
        "compiler.cli.commands:compile_command", "Compile", "Split a model or a folder of them, write a package."
    ),
    "build": Place(
        "compiler.cli.commands:build_command", "Compile", "Build a package's TensorRT engines on this machine."
    ),
    "run": Place("runtime.cli.run_commands:run", "Run", "Run a package once, from file to file."),
    "generate": Place("runtime.cli.generate_command:generate_command", "Run", "Generate text with a package."),
    "bench": Place(
        "runtime.cli.run_commands:bench_command", "Run", "Time a package: latency, rate, load of each rank."
    ),
    "check": Place("runtime.cli.check_command:check", "Look", "Compare a package's outputs with the unsplit model's."),
    "inspect": Place("runtime.cli.inspect_command:inspect", "Look", "Show what a package holds."),
    "devices": Place("runtime.cli.devices_command:devices", "Look", "List this machine's devices, or measure them."),
    "export": Place("runtime.cli.export_command:export", "Serve", "Write a package in the form that a server loads."),
    "help": Place("runtime.cli.help_command:help_command", "Help", "Show a command's help, or a page of the guide."),
}


class Program(Commands):
    """The commands of the table, imported when they are called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return installed()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            # For an unknown name, import all commands: typer suggests a similar one.
            wanted = [cmd_name] if cmd_name in COMMANDS else list(COMMANDS)
            self.commands = {**self.commands, **{name: command_of(name) for name in wanted if name in installed()}}
        return super().get_command(ctx, cmd_name)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """The names of commands, or the program's options. The table suffices for both."""
        self.commands = {name: TyperCommand(name, short_help=COMMANDS[name].line) for name in installed()}
        return super().shell_complete(ctx, incomplete)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        print_program_help(out, self, ctx, {name: (COMMANDS[name].topic, COMMANDS[name].line) for name in installed()})


def installed() -> list[str]:
    """The names of the commands that are installed here."""
    return [name for name, place in COMMANDS.items() if find_spec(f"splitc.{place.function.partition('.')[0]}")]


@cache
def command_of(name: str) -> Any:
    """A command of the table as Typer builds it. It is built once a process, since that takes milliseconds."""
    module, function = COMMANDS[name].function.split(":")
    alone = typer.Typer()
    alone.command(name, cls=Command)(getattr(import_module(f"splitc.{module}"), function))
    return typer.main.get_group(alone).commands[name]


app = typer.Typer(
    name="splitc",
    cls=Program,
    help="Split an ONNX model, or a pipeline of several, over devices; run them as one.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _version(show: bool) -> None:
    if show:
        out.print(f"splitc {VERSION}")
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Options of the program itself."""
