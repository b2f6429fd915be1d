"""The scratch space of ONNX Runtime's sessions on GPUs."""

from __future__ import annotations

import os

# The size of a buffer in KiB, and their number.
WORKSPACE = ":4096:1"


def set_workspace() -> None:
    """Limit the scratch space of each session's cuBLAS, unless the user did.

    It has 70 MiB by default: more than many segments need.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)
