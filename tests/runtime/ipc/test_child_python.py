"""splitc's child Python processes."""

from __future__ import annotations

import os
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


def test_cause_is_told_and_not_what_follows() -> None:
    follows = "from splitc.runtime.errors import FollowingError", "raise FollowingError('a sum was given up')"
    commands = [python_command(*follows), python_command("import os", "raise ValueError('bad')")]
    with pytest.raises(SplitcError, match=r"^can't do other: ValueError: bad$"):
        last_lines(commands, ["do one", "do other"])


def test_one_that_waits_for_another_which_says_much() -> None:
    read, write = os.pipe()
    waits = python_command("import select", f"print(len(select.select([{read}], [], [], 20)[0]))")
    says = python_command("import os", f"sys.stderr.write('x' * 200000); os.write({write}, b'x'); print('said')")
    try:
        assert last_lines([waits, says], ["wait", "say"], [read, write]) == ["1", "said"]
    finally:
        os.close(read)
        os.close(write)


def test_none_is_left_where_not_all_can_start() -> None:
    before = psutil.Process().children()
    with pytest.raises(FileNotFoundError):
        last_lines([python_command("import time", "time.sleep(60)"), ["/nowhere/python"]], ["", ""])
    assert psutil.Process().children() == before


def test_program_that_embeds_python_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(MisuseError, match=r"sys\.executable is '', which is no program: set it to Python's path"):
        python_command("import os", "os.getpid()")
