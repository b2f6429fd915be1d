"""NCCL's communicators, for engines that exchange values with other ranks' while they run."""

from __future__ import annotations

import importlib
import os
from typing import Any

from splitc.runtime.errors import PackageError


def find_nccl() -> Any:
    """CuPy's NCCL. Raises PackageError, with the package that brings it, where it is missing."""
    nccl = importlib.import_module("cupy.cuda.nccl")
    if not nccl.available:
        raise PackageError(
            "these engines sum over GPUs by NCCL: pip install nvidia-nccl-cu12 (or -cu13, with a driver of CUDA 13)"
        )
    # All connections when a communicator is made, and not in the first collective, which would make the host wait.
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    return nccl
