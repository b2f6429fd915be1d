"""Which kernels ONNX Runtime's operator MoE uses on GPUs."""

from __future__ import annotations

import os

# The variable by which users choose: 0 tries all kernels, 1 takes the first one.
VARIABLE = "ORT_FORCE_DETERMINISTIC_MOE"


def use_first_expert_kernels() -> None:
    """Keep the operator from trying its kernels, unless the user chose that by the variable.

    Each node would try them all for each power of two of rows that it meets: on an H200 in 30 to 670 ms, so seconds for
    a prompt of a new length. The fastest then takes 0.28 ms for 512 tokens of 64 experts of 768, the first one 0.48.
    """
    if VARIABLE not in os.environ:
        # Read whenever a node runs. Not by os.environ: it would look like the user's choice.
        os.putenv(VARIABLE, "1")
