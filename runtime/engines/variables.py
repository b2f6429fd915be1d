"""Variables of the environment, and options, that choose ONNX Runtime's kernels on GPUs. What the user set stays."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping

# Whether the operator MoE tries all of its kernels (0) or takes the first one (1).
EXPERTS = "ORT_FORCE_DETERMINISTIC_MOE"
# cuBLAS's scratch space: the size of a buffer in KiB, and their number.
WORKSPACE = ":4096:1"


def use_first_expert_kernels() -> None:
    """Keep the operator MoE from trying its kernels, unless the user chose.

    Each node would try them all for each power of two of rows that it meets: on an H200 in 30 to 670 ms, so seconds for
    a prompt of a new length. The fastest then takes 0.28 ms for 512 tokens of 64 experts of 768, the first one 0.48.
    """
    if EXPERTS not in os.environ:
        # Read whenever a node runs. Not by os.environ: it would look like the user's choice.
        os.putenv(EXPERTS, "1")


def set_workspace() -> None:
    """Limit the scratch space of each session's cuBLAS, unless the user did.

    It has 70 MiB by default: more than many segments need.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)


# Variables by which users choose kernels: cuDNN's attention, and XQA for single tokens.
CUDNN, XQA = "ORT_ENABLE_CUDNN_FLASH_ATTENTION", "ORT_ENABLE_XQA"
# Bits of the provider's option `sdpa_kernel`: flash, memory-efficient, TensorRT's, math, TensorRT's flash and cross;
# and cuDNN's, which plans 25 to 40 ms for each attention and each new shape.
_FOR_NEW_SHAPES = 1 | 2 | 4 | 16 | 32 | 64
_FOR_KNOWN_SHAPES = _FOR_NEW_SHAPES | 8
_MEMORY_EFFICIENT = 2

_lock = threading.Lock()
# The GPU of this process whose sessions use XQA; none before the first session.
_with_xqa: list[int] = []
# Whether the variable stays as it is.
_for_good = threading.Event()


def use_xqa_for_good(gpu: int) -> None:
    """Set XQA's variable for all sessions of a process with one GPU, unless the user chose kernels.

    To set a variable may move others that a thread reads: NCCL's, which connects while sessions are made, crashed.
    """
    with _lock:
        if _is_users_choice() or _for_good.is_set():
            return
        _with_xqa.append(gpu)
        os.putenv(XQA, str(int(gpu == _with_xqa[0])))
        _for_good.set()


def _is_users_choice() -> bool:
    return not os.environ.keys().isdisjoint((CUDNN, XQA))


@contextlib.contextmanager
def attention_for(known_shapes: bool, gpu: int, unaligned_bias: bool = False) -> Iterator[Mapping[str, str]]:
    """The provider's attention options: cuDNN for captured shapes, kernels that need no planning for others.

    With an `unaligned_bias`, without the memory-efficient kernel (engine_graphs/unaligned_bias.py).

    Sessions that are made inside compute single tokens by XQA, which needs no planning either, on the first `gpu` that
    this process uses: on others its kernels fail. For an 8B decoder on an H200, replayed tokens take as long as with
    cuDNN's kernels, 5.2 ms and 5.5 after 8,000 others, and to capture the first one takes 30 to 70 ms, not 120 to 700.
    """
    if _is_users_choice():
        yield {}
        return
    with _lock:
        if not _with_xqa:
            _with_xqa.append(gpu)
        # Read when a session is made. Not by os.environ: other threads, and processes that they start meanwhile, would
        # take it for the user's choice.
        if not _for_good.is_set():
            os.putenv(XQA, str(int(gpu in _with_xqa)))
        try:
            kernels = _FOR_KNOWN_SHAPES if known_shapes else _FOR_NEW_SHAPES
            yield {"sdpa_kernel": str(kernels & ~_MEMORY_EFFICIENT if unaligned_bias else kernels)}
        finally:
            if not _for_good.is_set():
                os.unsetenv(XQA)
