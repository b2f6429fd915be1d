"""Names from models can't control a terminal."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.text import Text

from splitc.runtime.cli import terminal
from tests.helpers.command import splitc

# Clears the screen, sets the title, rings, goes back, turns the order around, and a control sequence in one character.
EVIL = "a\x1b[2J\x1b]0;title\x07\r\x08\N{RIGHT-TO-LEFT OVERRIDE}\x9b31m\x7f"
POWERS = "\x1b\x07\r\x08\N{RIGHT-TO-LEFT OVERRIDE}\x9b\x7f"


def assert_harmless(text: str) -> None:
    assert not set(text) & set(POWERS), ascii(text)
    assert "2J" in text, "what there is is shown"


def test_names_are_shown_and_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """In tables, lines and composed texts; also to files, which may be shown on terminals."""
    shown = io.StringIO()
    monkeypatch.setattr(terminal.out, "_file", shown)
    rows = terminal.table("name", f"header {EVIL}")
    rows.add_row(EVIL, Text(EVIL, style="bold"))
    rows.add_row("a\nb", "c")
    terminal.out.print(rows)
    terminal.out.print(Text.assemble(("error: ", "bold red"), EVIL), EVIL, f"[{EVIL}] :smile:")
    assert_harmless(shown.getvalue())
    assert ":smile:" in shown.getvalue()
    assert "\N{SYMBOL FOR ESCAPE}[2J" in shown.getvalue()


def test_json_has_them_escaped(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    terminal.print_json({EVIL: [EVIL, "é😀"]})
    sys.stdout.flush()
    printed = capfdbinary.readouterr().out.decode()
    assert json.loads(printed) == {EVIL: [EVIL, "é😀"]}
    assert_harmless(printed)


@pytest.mark.parametrize("arguments", [[EVIL], [f"--{EVIL}"], ["inspect", f"--{EVIL}"], ["inspect", "x", EVIL]])
def test_so_are_wrong_options(arguments: list[str]) -> None:
    found = splitc(*arguments, code=2)
    assert not found.stdout
    assert not set(found.stderr) & set(POWERS), ascii(found.stderr)


@pytest.mark.parametrize("value", ["0", "many"])
def test_a_refused_value_is_shown(value: str, package: Path) -> None:
    assert value in splitc("bench", package, "--runs", value, code=2).stderr


def test_generated_text_is_sent_as_it_is_but_to_terminals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal.print_output(f"{EVIL}\n\tb")
    assert capsys.readouterr().out == f"{EVIL}\n\tb"
    monkeypatch.setattr(terminal, "out", SimpleNamespace(is_terminal=True))
    terminal.print_output(f"{EVIL}\n\tb")
    printed = capsys.readouterr().out
    assert_harmless(printed)
    assert printed.endswith("\n\tb")


def test_stderr_is_back_after_an_interrupt(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """An interrupt while it is muted: otherwise the message would be lost."""
    mute = os.dup2

    def interrupted(source: int, target: int) -> None:
        mute(source, target)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "dup2", interrupted)
    with pytest.raises(KeyboardInterrupt), terminal.muted_stderr():
        pass
    os.write(2, b"still there")
    assert capfd.readouterr().err == "still there"
