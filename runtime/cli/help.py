"""The help of splitc and of each command: short, by topic, and with an example."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

# Longer lines are hard to read.
WIDEST = 100
# The order of options in the help. Others come after them.
TOPICS: dict[str, Sequence[str]] = {
    "Devices": (
        *("--device", "--hosts", "--memory", "--headroom", "--interconnect", "--threads", "--ranks", "--reference"),
        "--no-memory",
    ),
    "Split": (
        *("--split-mode", "--objective", "--spread", "--tensor-split", "--batch-groups", "--pipeline-stages"),
        *("--main-device", "--place", "--experts"),
        *("--row-min", "--fallback", "--swap", "--profile", "--explain", "--plan"),
    ),
    "Model and inputs": (
        *("--export", "--module", "--model", "--shapes", "--min-shapes", "--opt-shapes", "--max-shapes", "--set"),
        *("--inputs", "--state", "--no-state"),
        *("--seed", "--fill", "--trust-external-data"),
    ),
    "Text": (
        *("--prompt", "--prompt-ids", "--image", "--audio", "--language", "--task", "--tokenizer", "--max-new-tokens"),
        *("--temperature", "--top-k"),
        *("--top-p", "--stop", "--prefill", "--prompt-chunk"),
    ),
    "Server": ("--name", "--sequences", "--capacity", "--idle", "--batch", "--ensemble", "--plans", "--context"),
    "Runs": ("--runs", "--warmup", "--in-flight", "--baseline", "--before", "--baseline-threads", "--measure"),
    "Adapters": ("--lora", "--lora-slots", "--adapter"),
    "Comparison": ("--rtol", "--atol"),
    "Engines": (
        "--engine",
        "--no-fuse",
        "--cuda-graph",
        "--host-code",
        "--verify",
        "--weights",
        "--weights-at",
        "--jobs",
    ),
    "Output": ("--output", "--outputs", "--force", "--report", "--trace", "--rank", "--json", "--help"),
}
EXAMPLES = {
    "devices": "splitc devices --measure",
    "run": "splitc run package --inputs inputs.npz --outputs outputs.npz",
    "check": "splitc check package model.onnx",
    "bench": "splitc bench package --in-flight 4 --baseline model.onnx --report bench.html",
    "generate": 'splitc generate package --prompt "Once upon a time" --tokenizer tokenizer.json',
    "inspect": "splitc inspect package",
    "export": "splitc export triton package -o repository",
    "help": "splitc help planning#budgets",
    "plan": "splitc plan model.onnx -d 2xcuda --memory 20GiB --report plan.html",
    "compile": "splitc compile model.onnx -o package -d 2xcuda --shapes input_ids:1x512",
    "build": "splitc build package --jobs 2",
}
# Descriptions of Typer's own options.
PROGRAM_OPTIONS = {
    "install_completion": "Have this shell complete commands, options and values.",
    "show_completion": "Print the script that does so.",
    "help": "Show this; splitc COMMAND --help: a command's options.",
}
# Of splitc itself.
EXAMPLE = (
    "splitc compile model.onnx -o package -d cuda0 -d cuda1 --shapes ids:1x512",
    "splitc bench package --baseline model.onnx",
)


def print_program_help(console: Console, program: Any, context: Any, commands: Mapping[str, tuple[str, str]]) -> None:
    """Print what splitc does, its commands by topic with a line each, and its own options."""
    console.print(f"Usage: {context.command_path} COMMAND [OPTIONS]\n\n{program.help}\n")
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, (topic, line) in commands.items():
        groups.setdefault(topic, []).append((name, line))
    for topic, members in groups.items():
        _print_lines(console, topic, members, max(map(len, commands)))
    options = [option for option in program.get_params(context) if not getattr(option, "hidden", False)]
    lines = [(_call(option), PROGRAM_OPTIONS.get(option.name, option.help)) for option in options]
    _print_lines(console, "Options", lines, max(len(call) for call, _ in lines))
    console.print(Text("Example", "bold"))
    for line in EXAMPLE:
        console.print(Text(f"  {line}"), soft_wrap=True)


def _print_lines(console: Console, topic: str, lines: Sequence[tuple[str, str]], width: int) -> None:
    """Print calls below a topic, with a description each."""
    console.print(Text(topic, "bold"))
    for call, does in lines:
        console.print(Text.assemble("  ", (call.ljust(width), "cyan"), f"  {does}"), soft_wrap=True)


def print_help(console: Console, command: Any, context: Any) -> None:
    """Print a command's help, no wider than the terminal."""
    asked = os.environ.get("COLUMNS", "")
    width = min(console.width, WIDEST, int(asked) if asked.isdecimal() and int(asked) else WIDEST)
    parameters = [parameter for parameter in command.get_params(context) if not getattr(parameter, "hidden", False)]
    arguments = [parameter for parameter in parameters if parameter.param_type_name == "argument"]
    words = [parameter.metavar or (parameter.name or "").upper() for parameter in arguments]
    console.print(f"Usage: {' '.join([context.command_path, '[OPTIONS]', *words])}\n", width=width)
    if command.help:  # Python -OO drops docstrings
        console.print(f"{command.help}\n", width=width)
    groups: dict[str, list[Any]] = {topic: [] for topic in ("", *TOPICS)}
    for parameter in parameters:
        groups.setdefault("" if parameter in arguments else _topic(parameter), []).append(parameter)
    for topic, members in groups.items():
        if members:
            rows = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
            rows.add_column(no_wrap=True)
            rows.add_column(overflow="fold")
            for member in sorted(members, key=lambda member: _place(topic, member)):
                rows.add_row(Text(_call(member), "cyan"), _say(member))
            if topic:
                console.print(Text(topic, "bold"))
            console.print(Padding(rows, (0, 0, 1, 2)), width=width)
    if (example := EXAMPLES.get(command.name)) is not None:
        console.print(Text("Example", "bold"))
        console.print(Text(f"  {example}"), soft_wrap=True)


def _topic(parameter: Any) -> str:
    """The topic of an option: its own, or else the table's."""
    own = getattr(parameter, "rich_help_panel", None)
    names = {*parameter.opts, *parameter.secondary_opts}
    return own or next((topic for topic, flags in TOPICS.items() if names & {*flags}), "Others")


def _place(topic: str, parameter: Any) -> int:
    """The place of an option among those of its topic."""
    known, names = TOPICS.get(topic, ()), {*parameter.opts, *parameter.secondary_opts}
    return next((place for place, name in enumerate(known) if name in names), len(known))


def _call(parameter: Any) -> str:
    """How to write a parameter: `-d, --device NAME`."""
    if parameter.param_type_name == "argument":
        return parameter.metavar or (parameter.name or "").upper()
    names = ", ".join(sorted(parameter.opts, key=len))
    if parameter.is_flag:
        return "/".join([names, *parameter.secondary_opts])
    return f"{names} {parameter.metavar or names.rpartition('-')[2].upper()}"


def _say(parameter: Any) -> str:
    """A parameter's description and its default."""
    said, default = parameter.help or "", parameter.default
    if parameter.required and parameter.param_type_name == "option":
        return f"{said} [required]"
    if getattr(parameter, "is_flag", False):
        return f"{said} [default: on]" if default and parameter.secondary_opts else said
    shown = default is not None and default != [] and default != () and not callable(default)
    return f"{said} [default: {default}]" if shown and not parameter.required else said
