"""Output fits a terminal of 80 columns, with long names, brackets in them, and many devices."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from models.writer import Writer, save
from splitc.runtime.cli import help as help_texts
from splitc.runtime.cli import terminal
from splitc.runtime.cli.app import COMMANDS, command_of
from splitc.runtime.units import shortened_middle
from tests.helpers.command import splitc

# Budgets here are those of tiny models.
pytestmark = pytest.mark.usefixtures("bare_engines")

WIDTH = 80
SCOPE = "[bold]transformer/an_encoder_with_a_long_name_as_exporters_write_them/and_its_layers."
INPUT = "[red]an_input_with_quite_a_long_name_that_goes_on_and_on_and_on_for_ever[/red]"


@pytest.fixture(scope="module")
def long_names(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight blocks whose values and weights have long names."""
    w, square = Writer(), ir.tensor(np.full((64, 64), 0.01, np.float32))
    value = w.input(INPUT, ir.DataType.FLOAT, ["batch", 64])
    for layer in range(8):
        with w.scope(f"{SCOPE}{layer}"):
            inner = w.op("Relu", w.op("MatMul", value, w.weight(f"{SCOPE}{layer}.up", square)))
            value = w.op("Add", value, w.op("MatMul", inner, w.weight(f"{SCOPE}{layer}.down", square)))
    w.output(value, f"{INPUT}.output", ir.DataType.FLOAT, ["batch", 64])
    path = tmp_path_factory.mktemp("long") / "model.onnx"
    save(w.model(), path)
    return path


def lines(*arguments: object) -> list[str]:
    """A command's output without warnings, which a terminal wraps itself."""
    return splitc(*arguments).stdout.splitlines()


def test_commands_fit_a_terminal(long_names: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.out, "_width", WIDTH)
    package = tmp_path / "p"
    plan = ("plan", long_names)
    shown = [
        lines(*plan, "-d", "8xcpu", "--spread", "--split-mode", "layer"),
        lines(*plan, "--hosts", "2x4xcpu", "--memory", "100KiB"),
        lines(*plan, "-d", "3xcpu", "--split-mode", "tensor", "--explain"),
        lines(*plan, "-d", "3xcpu", "--split-mode", "row", "--row-min", 16),
    ]
    splitc("compile", long_names, "-d", "4xcpu", "--split-mode", "layer", "-o", package)
    shown.append(lines("inspect", package))
    shown.append(lines("bench", package, "--runs", 2, "--baseline", long_names))
    shown.append(lines("check", package, "--model", long_names, "--no-memory"))
    for each in shown:
        assert [line for line in each if len(line) > WIDTH] == []
    cuts = [line for line in shown[0] if line.startswith("cut ")]
    assert len(cuts) == 7
    assert all(line.endswith(")") and "(/[bold]transf" in line for line in cuts), "a line each"
    assert any("[red]" in line and "[/red]" in line for line in shown[4])


@pytest.mark.parametrize("width", [60, WIDTH])
def test_words_of_tables_are_whole(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of several words are wrapped before columns of one word."""
    monkeypatch.setattr(terminal.out, "_width", width)
    rows = terminal.table("", "node", "weights", "of budget", "why", right=("weights",))
    name, why = "x" * (width // 2 - 2), "as a reason has several words it may take several lines"
    rows.add_row("norm", name, "12.3 MiB", "1%", why)
    with terminal.out.capture() as shown:
        terminal.out.print(rows)
    lines = shown.get().splitlines()
    words = [word for line in lines for word in line.split()]
    assert {name, "budget", *why.split()} <= set(words)
    assert max(map(len, lines)) <= width


def test_nothing_is_cut_off_where_numbers_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.out, "_width", 30)
    rows = terminal.table("rank", "loaded", "predicted", "peak", right=("loaded", "predicted", "peak"))
    rows.add_row("0 cpu0", "12.3 MiB", "45.6 MiB", "78.9 MiB")
    with terminal.out.capture() as shown:
        terminal.out.print(rows)
    assert shown.get().count("MiB") == 3
    assert max(map(len, shown.get().splitlines())) <= 30


def test_names_are_whole_where_there_is_room(long_names: Path) -> None:
    assert (
        f"(/{SCOPE}0/Add_output_0)"
        in splitc("plan", long_names, "-d", "8xcpu", "--spread", "--split-mode", "layer").stdout
    )


def test_names_are_shortened_in_the_middle() -> None:
    assert shortened_middle("abcdefghij", 10) == "abcdefghij"
    assert shortened_middle("abcdefghijk", 10) == "abc…fghijk"
    assert {len(shortened_middle("x" * 50, most)) for most in (5, 20, 49)} == {5, 20, 49}


@pytest.mark.parametrize("command", help_texts.EXAMPLES)
def test_help_is_short_and_has_an_example(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.out, "_width", WIDTH)
    *shown, example = splitc(command, "--help").stdout.strip().splitlines()
    assert len(shown) < 125
    assert [line for line in shown if len(line) > WIDTH] == []
    assert example.strip() == help_texts.EXAMPLES[command] and len(example) <= 80
    assert "Others" not in shown, "give the option a topic"


@pytest.mark.parametrize("arguments", [["--help"], ["help"], []])
def test_program_says_what_it_has_in_few_lines(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.out, "_width", WIDTH)
    shown = splitc(*arguments, code=0 if arguments else 2).stdout.rstrip().splitlines()
    assert [line for line in shown if len(line) > WIDTH] == []
    listed = [line.split()[0] for line in shown if line.startswith("  ") and not line.startswith(("  -", "  splitc"))]
    assert listed == list(COMMANDS), "each has its line"
    topics = [line for line in shown[3:] if line and line[0] != " "]
    assert topics[:7] == ["Compile", "Run", "Look", "Serve", "Help", "Options", "Example"]
    assert shown[0].startswith("Usage: ") and shown[0].endswith("splitc COMMAND [OPTIONS]")
    assert len(shown) < 60 if arguments == ["help"] else len(shown) < 33


def test_lines_of_the_program_are_in_the_words_of_commands() -> None:
    """Each listed command exists; for an unknown one, a similar one is suggested."""
    assert set(COMMANDS) == {command_of(name).name for name in COMMANDS}
    assert "'compile'" in splitc("comple", code=2).stderr


def test_help_shows_a_command_as_its_own_option_does() -> None:
    shown = splitc("help", "inspect").stdout
    assert shown.strip() == splitc("inspect", "--help").stdout.strip()
    assert json.loads(splitc("help", "inspect", "--json").stdout)["text"] == shown


def test_every_command_has_an_example() -> None:
    assert set(COMMANDS) == set(help_texts.EXAMPLES)
