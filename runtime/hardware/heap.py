"""The C library's heap, where it is glibc's."""

from __future__ import annotations

import ctypes

import numpy as np

# The largest block from whose freeing glibc learns: it then takes blocks up to this size from its heap, and keeps twice
# as much of what is freed (mallopt(3), M_MMAP_THRESHOLD).
LARGEST_LEARNT = 32 << 20


def trim_heap() -> None:
    """Give back to the system what loading has freed, up to a tenth of a model."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed_arrays() -> None:
    """Have freed arrays kept for the next ones of up to 32 MiB.

    As Python starts, glibc gives back each freed array from 128 KiB on. Outputs of the next request are then new
    pages, which the system fills with zeros: an eighth of a small token in tensor mode. A program that frees a large
    array makes glibc learn; so this frees one, which is never written and takes no memory.
    """
    np.empty(LARGEST_LEARNT - (1 << 16), np.uint8)
