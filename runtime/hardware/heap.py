"""The C library's heap, where it is glibc's."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator

import numpy as np

# The largest block from whose freeing glibc learns: it then takes blocks up to this size from its heap, and keeps twice
# as much of what is freed (mallopt(3), M_MMAP_THRESHOLD).
LARGEST_LEARNT = 32 << 20


# mallopt(3): blocks from the first size on are pages of their own, and from the second on what is free goes back.
_OWN_PAGES, _GIVEN_BACK = -3, -1
# Blocks from this size on are pages of their own while engines are loaded: parts of weights, and not nodes.
LARGE = 128 << 10

_LOCK = threading.Lock()
_loading = 0


@contextlib.contextmanager
def compact_heap() -> Iterator[None]:
    """Return freed memory to the system at once while engines are loaded, and the rest at the end.

    ONNX Runtime folds and packs weights one by one, and frees their sources. In a heap that leaves gaps which later
    ones do not fit into: they took up to half of a model's weights. Later, blocks of up to LARGEST_LEARNT come from the
    heap, as glibc would have learnt.
    """
    global _loading
    libc = ctypes.CDLL(None)
    set_option = getattr(libc, "mallopt", lambda option, size: 0)
    with _LOCK:
        _loading += 1
        set_option(_OWN_PAGES, LARGE)
    try:
        yield
    finally:
        with _LOCK:
            _loading -= 1
            if not _loading:
                set_option(_OWN_PAGES, LARGEST_LEARNT)
                set_option(_GIVEN_BACK, 2 * LARGEST_LEARNT)
        getattr(libc, "malloc_trim", lambda left: 0)(0)


def keep_freed_arrays() -> None:
    """Have freed arrays kept for the next ones of up to 32 MiB.

    As Python starts, glibc gives back each freed array from 128 KiB on. Outputs of the next request are then new
    pages, which the system fills with zeros: an eighth of a small token in tensor mode. A program that frees a large
    array makes glibc learn; so this frees one, which is never written and takes no memory.
    """
    np.empty(LARGEST_LEARNT - (1 << 16), np.uint8)
