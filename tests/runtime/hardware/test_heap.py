"""How much freed memory the heap keeps."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Page faults of 100 arrays of 1 MiB, each freed before the next one.
FAULTS = """
import resource, numpy as np
from splitc.runtime.hardware.heap import compact_heap, keep_freed_arrays
{}
np.ones(1 << 20, np.uint8)
first = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    np.ones(1 << 20, np.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - first)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep what they keep")
def test_freed_arrays_are_used_again_without_new_pages() -> None:
    with_it, after_loading, without = (
        int(output_of(FAULTS.format(call))) for call in ("keep_freed_arrays()", "with compact_heap(): pass", "")
    )
    if without < 100:
        pytest.skip("this NumPy keeps freed arrays by itself")
    assert with_it < 100, "less than one page an array"
    assert after_loading < 100


# MiB that are held of 64 arrays of 1 MiB, half of which were freed, in a heap that has learnt to keep them.
GAPS = """
import contextlib, numpy as np
from splitc.runtime.hardware.heap import compact_heap, keep_freed_arrays
def held():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) >> 10
keep_freed_arrays()
first = held()
with {}:
    arrays = [np.ones(1 << 20, np.uint8) for _ in range(64)]
    del arrays[::2]
    print(held() - first)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep what they keep")
def test_gaps_between_weights_go_back_while_engines_are_loaded() -> None:
    compact, plain = (int(output_of(GAPS.format(how))) for how in ("compact_heap()", "contextlib.nullcontext()"))
    assert compact < 40 < 60 < plain


def output_of(program: str) -> bytes:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
