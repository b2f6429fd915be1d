"""splitc's child Python processes."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from splitc.runtime.errors import MisuseError, SplitcError
from splitc.runtime.ipc.child_python import last_line, python_command


def test_what_it_prints_last() -> None:
    assert last_line(python_command("import os", "print('a'); print(1)"), "print") == "1"
    with pytest.raises(SplitcError, match=r"^can't do it: ValueError: bad$"):
        last_line(python_command("import os", "raise ValueError('bad')"), "do it")


def test_one_that_says_much() -> None:
    says = python_command("import sys", "sys.stderr.write('x' * 200000); print('y' * 200000); print('said')")
    assert last_line(says, "say") == "said"


def test_it_is_not_left_if_the_wait_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(process: subprocess.Popen[str], timeout: float | None = None) -> int:
        monkeypatch.undo()
        raise KeyboardInterrupt

    before = psutil.Process().children()
    monkeypatch.setattr(subprocess.Popen, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        last_line(python_command("import time", "time.sleep(60)"), "sleep")
    assert psutil.Process().children() == before


def test_program_that_embeds_python_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(MisuseError, match=r"sys\.executable is '', which is no program: set it to Python's path"):
        python_command("import os", "os.getpid()")
