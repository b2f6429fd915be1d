"""A command that gets a signal at some moment, and what it leaves: files, and processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.conftest import listen_to_interrupts, until
from tests.helpers.mpi import Mpi

# The environment's mark of all processes of one command, since those of a dead parent have no other.
MARK = "SPLITC_TEST_MARK"
# The command `splitc`, which says when Python has begun: what Python does to a signal before is not ours.
PROGRAM = "import sys, splitc.runtime.__main__ as it; print(flush=True); sys.argv[0] = 'splitc'; it.main()"


@dataclass(frozen=True)
class Killed:
    """How a command ended, how long it ran, what it said, and the names in the temporary folder that it left."""

    code: int
    seconds: float
    errors: str
    temporary: list[str]


def kill_after(
    seconds: float | None,
    number: int,
    command: Sequence[object],
    place: Path,
    mpi: Mpi | None = None,
    program: Sequence[object] = ("-c", PROGRAM),
) -> Killed:
    """Run splitc with a temporary folder of its own in `place`, and send its first process a signal after a while.

    With `mpi` that is mpirun, which starts three. None is no signal. All its processes must end within 15 seconds.
    `program` is what Python runs, with the command as its arguments.
    """
    temporary = place / "temporary"
    temporary.mkdir(exist_ok=True)
    mark = f"{place}-{time.monotonic_ns()}"
    start = [] if mpi is None else [str(mpi.mpirun), *mpi.options, "-n", "3"]
    process = subprocess.Popen(
        [*start, sys.executable, *map(str, program), *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **({} if mpi is None else mpi.environment), "TMPDIR": str(temporary), MARK: mark},
        preexec_fn=listen_to_interrupts,
    )
    assert process.stdout is not None
    for _ in range(1 if mpi is None else 3):
        process.stdout.readline()
    begun = time.monotonic()
    if seconds is not None:
        time.sleep(seconds)
        process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    took = time.monotonic() - begun
    until(lambda: not _marked(mark), 15)
    left = [path.name for path in temporary.iterdir() if path.name != ".ses"]  # that one is ONNX Runtime's
    return Killed(process.returncode, took, errors, left)


def codes(number: int) -> tuple[int, ...]:
    """The exit codes of a command that got this signal, which may have come too late.

    As Python ends it handles signals no more, and the system ends the process.
    """
    own = {int(signal.SIGINT): 130, int(signal.SIGTERM): 143}
    return (0, -number, own.get(number, -number))


def _marked(mark: str) -> list[psutil.Process]:
    """The processes of a command that still run."""
    return [process for process in psutil.process_iter() if _environment(process).get(MARK) == mark]


def _environment(process: psutil.Process) -> Mapping[str, str]:
    try:
        return {} if process.status() == psutil.STATUS_ZOMBIE else process.environ()
    except psutil.Error:
        return {}
