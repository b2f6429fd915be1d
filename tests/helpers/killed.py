"""Commands that get a signal at some moment, and the files and processes that they leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.conftest import listen_to_interrupts, until
from tests.helpers.mpi import ROOT, Mpi

# An environment variable that marks all processes of one command: orphans have no other relation to it.
MARK = "SPLITC_TEST_MARK"
# The command `splitc`, which prints a line once Python has started: signals before that are not handled by splitc.
PROGRAM = """
import sys, splitc.runtime.__main__ as it
it.handle_signals()
print(flush=True)
sys.argv[0] = "splitc"
it.main()
"""


@dataclass(frozen=True)
class Killed:
    """A command's exit code, its seconds, its messages, and the names that it left in the temporary folder."""

    code: int
    seconds: float
    errors: str
    temporary: list[str]
    shown: str = ""


def kill_after(
    seconds: float | None,
    number: int,
    command: Sequence[object],
    place: Path,
    mpi: Mpi | None = None,
    program: Sequence[object] = ("-c", PROGRAM),
    patience: float = 120,
) -> Killed:
    """Run splitc with a temporary folder in `place`, and send its first process a signal after so many seconds.

    If `seconds` is None, no signal is sent. With `mpi` the first process is mpirun, which starts three. All processes
    must end within 15 seconds. `program` is what Python runs, with the command as its arguments. Raises TimeoutExpired
    if it has not ended `patience` seconds after the signal.
    """
    mark, process = start_marked(place, [*map(str, program), *map(str, command)], mpi)
    assert process.stdout is not None
    for _ in range(1 if mpi is None else 3):
        process.stdout.readline()
    begun = time.monotonic()
    if seconds is not None:
        time.sleep(seconds)
        process.send_signal(number)
    try:
        shown, errors = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        end_marked(mark)
        raise
    took = time.monotonic() - begun
    until(lambda: not marked(mark), 15)
    return Killed(process.returncode, took, errors, left_in(place), shown)


def start_marked(place: Path, arguments: Sequence[str], mpi: Mpi | None = None) -> tuple[str, subprocess.Popen[str]]:
    """Start Python, or mpirun with three of it, with a temporary folder in `place`. Also returns the mark."""
    temporary = place / "temporary"
    temporary.mkdir(exist_ok=True)
    mark = f"{place}-{time.monotonic_ns()}"
    start = [] if mpi is None else [str(mpi.mpirun), *mpi.options, "-n", "3"]
    return mark, subprocess.Popen(
        [*start, sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **({} if mpi is None else mpi.environment), "TMPDIR": str(temporary), MARK: mark},
        preexec_fn=listen_to_interrupts,
    )


def left_in(place: Path) -> list[str]:
    """The names that are left in the temporary folder."""
    found = (place / "temporary").iterdir()
    return [path.name for path in found if path.name != ".ses"]  # that one is ONNX Runtime's


def codes(number: int) -> tuple[int, ...]:
    """The exit codes of a command after this signal, which may have come too late.

    While Python shuts down it no longer handles signals: then the system ends the process.
    """
    own = {int(signal.SIGINT): 130, int(signal.SIGTERM): 143}
    return (0, -number, own.get(number, -number))


def end_marked(mark: str) -> None:
    """End the processes of a command."""
    for process in marked(mark):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def marked(mark: str) -> list[psutil.Process]:
    """The processes of a command that still run."""
    return [process for process in psutil.process_iter() if _environment(process).get(MARK) == mark]


def _environment(process: psutil.Process) -> Mapping[str, str]:
    try:
        return {} if process.status() == psutil.STATUS_ZOMBIE else process.environ()
    except psutil.Error:
        return {}
