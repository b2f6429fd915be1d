"""splitc's child Python processes."""

from __future__ import annotations

import sys

import psutil
import pytest

from splitc.runtime.errors import MisuseError, SplitcError
from splitc.runtime.ipc.child_python import last_lines, python_command


def test_what_they_print_last() -> None:
    commands = [python_command("import os", f"print('a'); print({number})") for number in range(2)]
    assert last_lines(commands, ["one", "other"]) == ["0", "1"]
    with pytest.raises(SplitcError, match=r"^can't do other: ValueError: bad$"):
        last_lines([commands[0], python_command("import os", "raise ValueError('bad')")], ["do one", "do other"])


def test_none_is_left_where_not_all_can_start() -> None:
    before = psutil.Process().children()
    with pytest.raises(FileNotFoundError):
        last_lines([python_command("import time", "time.sleep(60)"), ["/nowhere/python"]], ["", ""])
    assert psutil.Process().children() == before


def test_program_that_embeds_python_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(MisuseError, match=r"sys\.executable is '', which is no program: set it to Python's path"):
        python_command("import os", "os.getpid()")
