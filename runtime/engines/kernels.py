"""A small CUDA kernel that reduces arrays of several GPUs on one of them, by peer access.

NCCL's collectives wait on each GPU for the other GPUs. That may hang if several GPUs' work is captured as one CUDA
graph. This kernel does not wait: the graph runs it when its inputs are ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from splitc.runtime.engines.gpu_array import GpuArray
from splitc.runtime.errors import EngineError
from splitc.runtime.gpus import need_cupy

# For each of numpy's types CUDA's type, and the one to compute in.
TYPES = {
    "bfloat16": ("__nv_bfloat16", "float"),
    "float16": ("__half", "float"),
    "float32": ("float", "float"),
    "float64": ("double", "double"),
    "int8": ("signed char", "int"),
    "uint8": ("unsigned char", "unsigned int"),
    "int32": ("int", "int"),
    "int64": ("long long", "long long"),
}
# The headers of types that are not built in. CuPy includes that of `__half`; the other comes with CUDA's runtime.
HEADERS = {"__nv_bfloat16": "#include <cuda_bf16.h>", "__half": "#include <cuda_fp16.h>"}
OPERATIONS = {"sum": "total + part", "max": "total > part ? total : part"}
THREADS = 256
# Bytes of each part that a thread reads at once: the most that one instruction can.
WIDTH = 16
SOURCE = """
{header}
struct alignas({width}) Pack {{ {kind} values[{width} / sizeof({kind})]; }};
extern "C" __global__ void combine({parameters}{kind}* whole, long long size) {{
    const {kind}* parts[] = {{ {names} }};
    const int wide = {width} / sizeof({kind});
    long long first = wide * (blockIdx.x * (long long) blockDim.x + threadIdx.x);
    if (first + wide <= size) {{
        Pack packs[{count}], result;
        for (int rank = 0; rank < {count}; ++rank) packs[rank] = *(const Pack*) (parts[rank] + first);
        for (int place = 0; place < wide; ++place) {{
            {work} total = ({work}) packs[0].values[place];
            for (int rank = 1; rank < {count}; ++rank) {{
                {work} part = ({work}) packs[rank].values[place];
                total = {operation};
            }}
            result.values[place] = ({kind}) total;
        }}
        *(Pack*) (whole + first) = result;
    }} else {{
        for (long long place = first; place < size; ++place) {{
            {work} total = ({work}) parts[0][place];
            for (int rank = 1; rank < {count}; ++rank) {{
                {work} part = ({work}) parts[rank][place];
                total = {operation};
            }}
            whole[place] = ({kind}) total;
        }}
    }}
}}
"""


def combine(operation: str, parts: Sequence[GpuArray], whole: GpuArray, size: int) -> None:
    """Write the `sum` or `max` of parts of `size` elements to `whole`, on CuPy's current GPU and stream.

    The parts are reduced in their order, so the result has the same bits on all GPUs. Raises EngineError for an
    unsupported number type, and if CuPy can't compile the kernel.
    """
    if whole.dtype not in TYPES:
        raise EngineError(f"can't sum {whole.dtype} over GPUs")
    kernel = _compile(operation, whole.dtype, len(parts))
    _launch(kernel, [*(part.pointer for part in parts), whole.pointer], size, whole.nbytes // size)


def copy(target: int, source: int, size: int) -> None:
    """Copy `size` bytes between two addresses, which may be in pinned memory or on another GPU.

    This is the sum of a single part. Raises EngineError if CuPy can't compile the kernel.
    """
    _launch(_compile("sum", "uint8", 1), [source, target], size, 1)


def _launch(kernel: Any, pointers: Sequence[int], size: int, width: int) -> None:
    blocks = -(-size // (THREADS * (WIDTH // width)))
    kernel((blocks,), (THREADS,), (*pointers, size))


@cache
def _compile(operation: str, dtype: str, count: int) -> Any:
    kind, work = TYPES[dtype]
    names = [f"part{rank}" for rank in range(count)]
    source = SOURCE.format(
        header=HEADERS.get(kind, ""),
        width=WIDTH,
        kind=kind,
        work=work,
        count=count,
        names=", ".join(names),
        parameters="".join(f"const {kind}* {name}, " for name in names),
        operation=OPERATIONS[operation],
    )
    try:
        kernel = need_cupy().RawKernel(source, "combine")
        kernel.compile()
    except Exception as error:  # CuPy has several kinds of errors, none of which says what to do
        raise EngineError(
            "CuPy can't compile the kernel that copies and sums over GPUs; its compiler is NVRTC, pip install "
            f"nvidia-cuda-nvrtc-cu12 (or nvidia-cuda-nvrtc with a driver of CUDA 13): {error}"
        ) from error
    return kernel
