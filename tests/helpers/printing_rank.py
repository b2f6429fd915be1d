"""A rank's process in which a library prints, as NCCL does with NCCL_DEBUG=INFO."""

from __future__ import annotations

import os

from splitc.runtime.processes import begin as real


def begin(control: int, pulse: int, parent: int, starts_cuda: bool) -> None:
    """Begin like the real process, then print."""
    real.begin(control, pulse, parent, starts_cuda)
    os.write(1, b"printed by a library\n")
