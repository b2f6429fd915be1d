"""Ranks' processes, forked from a process that has imported what ranks import.

The imports are most of what a rank's process costs. A forked process is the caller's child, and has the program, the
environment, the folder and the descriptors that a started one would have. Tests of how ranks start and end take the
fixture `plain_ranks`, with which nothing is forked.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# What the process imports before it forks, including the imports of ranks on fake GPUs.
MODULES = ("splitc.runtime.processes.rank", "onnxruntime", "tests.helpers.fake_rank")
ROOT = Path(__file__).resolve().parents[2]
# See prctl(2): orphans below this process become its children.
PR_SET_CHILD_SUBREAPER = 36
# More bytes than the longest message has.
LONGEST = 1 << 20


class Forking:
    """The process that is forked from. It starts with the first rank, and `end` ends it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start the process that is forked from, if it is not there."""
        with self._lock:
            self._connected()

    def end(self) -> None:
        """End the process that is forked from. The next rank starts another one."""
        with self._lock:
            if self._socket is not None and self._server is not None:
                self._socket.close()
                self._server.wait()
            self._socket = self._server = None

    def fork(self, asked: Any, descriptors: Sequence[int]) -> int:
        """Fork, and return the number of the process, which is a child of this one."""
        with self._lock:
            adopt_orphans(True)
            try:
                connection = self._connected()
                socket.send_fds(connection, [pickle.dumps(asked)], list(descriptors))
                return int(connection.recv(64))
            finally:
                adopt_orphans(False)

    def _connected(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            program = f"import sys; sys.path[:] = {sys.path!r}; from tests.helpers.forked import serve; "
            call = f"serve({theirs.fileno()}, {os.getpid()})"
            environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
            self._server = subprocess.Popen(
                [sys.executable, "-c", program + call], pass_fds=[theirs.fileno()], env=environment, cwd=ROOT
            )
            theirs.close()
        return self._socket


FORKING = Forking()


class ForkedRank(subprocess.Popen[bytes]):
    """What `splitc.runtime.processes.device_processes` gets as a process."""

    def _execute_child(self, args: list[str], *others: Any) -> None:
        _, _, _, pass_fds, cwd, env, *_ = others
        python, option, program = args
        assert (python, option, cwd) == (sys.executable, "-c", None)
        numbers = [1, 2, *pass_fds]
        asked = program, dict(env), Path.cwd(), numbers
        self.pid = FORKING.fork(asked, numbers)
        self._child_created = True


# Replaces the module `subprocess` there.
SUBPROCESS = SimpleNamespace(Popen=ForkedRank, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)


def adopt_orphans(does: bool) -> None:
    """Make orphans below this process its children. Returns whether that is possible."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(does), 0, 0, 0)


def serve(descriptor: int, caller: int) -> None:
    """Fork for the caller until it ends."""
    for module in MODULES:
        importlib.import_module(module)
    gc.freeze()
    connection = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        content, descriptors, _, _ = socket.recv_fds(connection, LONGEST, 64)
        if not content:
            return
        # The child of a child is orphaned at once, and the caller adopts it.
        if (child := os.fork()) == 0:
            if os.fork() == 0:
                while os.getppid() != caller:
                    time.sleep(1e-4)
                run(connection, descriptors, *pickle.loads(content))
            os._exit(0)
        os.waitpid(child, 0)
        for each in descriptors:
            os.close(each)


def run(
    connection: socket.socket,
    descriptors: Sequence[int],
    program: str,
    environment: dict[str, str],
    folder: Path,
    numbers: Sequence[int],
) -> None:
    """Run the program, and end this process as Python would."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    connection.send(str(os.getpid()).encode())
    connection.close()
    high = max(numbers) + 1  # the caller may have hundreds open
    above = [fcntl.fcntl(each, fcntl.F_DUPFD, high) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for each, number in zip(above, numbers, strict=True):
        os.dup2(each, number, inheritable=False)
        os.close(each)
    os.environ.clear()
    os.environ.update(environment)
    with contextlib.suppress(OSError):
        os.chdir(folder)
    code = 0
    try:
        exec(program, {"__name__": "__main__"})
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
