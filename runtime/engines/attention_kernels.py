"""Which kernels the attention of ONNX Runtime's engines uses on GPUs."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping

# Variables by which users choose kernels: cuDNN's attention, and XQA for single tokens.
CUDNN, XQA = "ORT_ENABLE_CUDNN_FLASH_ATTENTION", "ORT_ENABLE_XQA"
# Bits of the provider's option `sdpa_kernel`: flash, memory-efficient, TensorRT's, math, TensorRT's flash and cross;
# and cuDNN's, which plans 25 to 40 ms for each new shape of an engine.
_FOR_NEW_SHAPES = 1 | 2 | 4 | 16 | 32 | 64
_FOR_KNOWN_SHAPES = _FOR_NEW_SHAPES | 8

_lock = threading.Lock()


@contextlib.contextmanager
def attention_for(known_shapes: bool) -> Iterator[Mapping[str, str]]:
    """The provider's attention options: cuDNN for captured shapes, kernels that need no planning for others.

    Sessions that are made inside don't use XQA. It is slower than cuDNN (8B decoder on H200s, replayed tokens on one
    and two GPUs: 4.98 and 3.66 ms against 4.83 and 3.47), and only works on one GPU of a process.
    """
    if not os.environ.keys().isdisjoint((CUDNN, XQA)):
        yield {}
        return
    with _lock:
        # Read when a session is made. Not by os.environ: other threads, and processes that they start meanwhile, would
        # take it for the user's choice.
        os.putenv(XQA, "0")
        try:
            yield {"sdpa_kernel": str(_FOR_KNOWN_SHAPES if known_shapes else _FOR_NEW_SHAPES)}
        finally:
            os.unsetenv(XQA)
