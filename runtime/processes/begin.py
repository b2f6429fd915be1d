"""The beginning of a rank's process on a GPU: CUDA starts while Python imports the rest. Imports almost nothing."""

from __future__ import annotations

import contextlib
import ctypes
import threading


def start_cuda() -> None:
    """Make the first GPU's context on another thread. Without a driver or a GPU, whoever needs one says so later."""
    threading.Thread(target=_make_context, name="splitc starts CUDA", daemon=True).start()


def _make_context() -> None:
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)  # for the life of the process
