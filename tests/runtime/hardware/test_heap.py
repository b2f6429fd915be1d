"""What is kept of freed memory."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Page faults of 100 arrays of 1 MiB, each freed before the next one.
FAULTS = """
import resource, numpy as np
from splitc.runtime.hardware.heap import keep_freed_arrays
{}
np.ones(1 << 20, np.uint8)
first = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    np.ones(1 << 20, np.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - first)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep what they keep")
def test_freed_arrays_are_used_again_without_new_pages() -> None:
    with_it, without = (
        int(subprocess.run([sys.executable, "-c", FAULTS.format(call)], capture_output=True, check=True).stdout)
        for call in ("keep_freed_arrays()", "")
    )
    assert with_it < 100 < without, "less than one page an array"
