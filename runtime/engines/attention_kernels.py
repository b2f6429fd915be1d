"""Which kernels the attention of ONNX Runtime's engines uses on GPUs."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

# The variables by which users choose themselves: cuDNN's attention, and XQA for single tokens.
CUDNN, XQA = "ORT_ENABLE_CUDNN_FLASH_ATTENTION", "ORT_ENABLE_XQA"
# The kernels where XQA is on, as bits of the option `sdpa_kernel`: flash, memory-efficient, TensorRT's, math,
# TensorRT's flash and cross. cuDNN's (8) is not among them: it plans 25 to 40 ms for each new shape of each engine.
# Measured on an H200, 8B decoder, ms on one and two GPUs: prompts of new lengths 57 / 58 with it and 22 / 21 without;
# replayed tokens 4.77 / 3.68 with it and 4.90 / 3.71 without, but 5.39 / 3.70 without either.
WITHOUT_CUDNN = 1 | 2 | 4 | 16 | 32 | 64

_lock = threading.Lock()
# The GPU that has XQA in this process.
_gpus: list[int] = []


@contextlib.contextmanager
def attention_of(gpu: int) -> Iterator[dict[str, str]]:
    """The provider's options for the attention on this GPU, by its number. Meanwhile, sessions read whether to use XQA.

    XQA's kernels only work on one GPU of a process (ONNX Runtime 1.31: on others they fail with cudaErrorInvalidValue).
    The first one that asks has them.
    """
    if not os.environ.keys().isdisjoint((CUDNN, XQA)):
        yield {}
        return
    with _lock:
        if not _gpus:
            _gpus.append(gpu)
        has_xqa = gpu in _gpus
        os.environ[XQA] = str(int(has_xqa))
        try:
            yield {"sdpa_kernel": str(WITHOUT_CUDNN)} if has_xqa else {}
        finally:
            del os.environ[XQA]
