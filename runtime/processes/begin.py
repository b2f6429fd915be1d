"""The beginning of a process of ranks: signs of life, and CUDA starts, while Python imports the rest.

This imports almost nothing itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import signal
import struct
import threading
import time
from typing import NoReturn

from splitc.runtime.ipc.mapped_files import NCCL, find_mapped, remove_files

# Seconds between two signs of life.
BEAT = 0.5


def begin(control: int, pulse: int, parent: int, starts_cuda: bool) -> None:
    """Begin the process of a device's ranks, which goes on on this thread.

    `control` is the descriptor of the socket to the caller's process, which is `parent`, `pulse` that of memory for the
    time of the last sign of life, by time.monotonic.
    """
    print_to_stderr()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal gives it to all, and the caller ends this one if it ends
    threading.Thread(target=_show_life, args=(control, pulse, parent), name="splitc pulse", daemon=True).start()
    if starts_cuda:
        threading.Thread(target=_make_context, name="splitc starts CUDA", daemon=True).start()


def print_to_stderr() -> None:
    """Let what this process's libraries print go to stderr, as NCCL's messages do: stdout is the caller's results."""
    with contextlib.suppress(OSError):  # the caller has no stderr
        os.dup2(2, 1)


def _show_life(control: int, pulse: int, parent: int) -> None:
    """Say again and again that the process is alive, and end it when the caller's process has ended."""
    times = mmap.mmap(pulse, os.fstat(pulse).st_size)
    os.close(pulse)
    hangup = select.poll()
    hangup.register(control, select.POLLHUP)  # which is always reported, and nothing else
    while True:
        struct.pack_into("d", times, 0, time.monotonic())
        if any(event & (select.POLLHUP | select.POLLERR) for _, event in hangup.poll(1e3 * BEAT)):
            break
        if os.getppid() != parent:  # a copy of the caller may still hold the other end of the socket
            break
    end_at_once()


def end_at_once() -> NoReturn:
    """End this process without a word, since the caller's process has ended. Nothing of NCCL's is left behind."""
    remove_files(find_mapped(os.getpid(), NCCL))
    os._exit(1)


def _make_context() -> None:
    """Make the context of the first GPU. Without a driver or a GPU, whoever needs one says so later."""
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)  # for the life of the process
