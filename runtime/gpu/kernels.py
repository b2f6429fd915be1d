"""A small CUDA kernel for copies: in a captured graph it starts sooner than CUDA's own copy."""

from __future__ import annotations

from functools import cache
from typing import Any

from splitc.runtime.errors import EngineError
from splitc.runtime.hardware.gpus import need_cupy

# Threads of a block: a usual number, for kernels that only move memory and wait for that.
THREADS = 256
# Bytes that a thread copies at once: the most that one instruction can.
WIDTH = 16
SOURCE = """
struct alignas(16) Pack { unsigned char bytes[16]; };
extern "C" __global__ void copy(const unsigned char* source, unsigned char* target, long long size) {
    long long first = 16 * (blockIdx.x * (long long) blockDim.x + threadIdx.x);
    if (first + 16 <= size) *(Pack*) (target + first) = *(const Pack*) (source + first);
    else for (long long place = first; place < size; ++place) target[place] = source[place];
}
"""


def copy(target: int, source: int, size: int) -> None:
    """Copy `size` bytes between two addresses, which may be in pinned memory, on CuPy's current GPU and stream.

    Raises EngineError if CuPy can't compile the kernel.
    """
    blocks = -(-size // (THREADS * WIDTH))
    _compile()((blocks,), (THREADS,), (source, target, size))


@cache
def _compile() -> Any:
    try:
        kernel = need_cupy().RawKernel(SOURCE, "copy")
        kernel.compile()
    except Exception as error:  # CuPy has several kinds of errors, none of which says what to do
        raise EngineError(
            "CuPy can't compile the kernel that copies on GPUs; it needs NVRTC: pip install "
            f"nvidia-cuda-nvrtc-cu12 (or nvidia-cuda-nvrtc with a driver of CUDA 13): {error}"
        ) from error
    return kernel
