"""Arrays of several GPUs brought together by one of them, which reads the others' memory: a kernel of a few lines.

NCCL's collectives wait on each GPU for the others, which may hang when several GPUs' work is captured as a CUDA graph.
This kernel waits for nothing: the graph runs it when what it reads is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from splitc.runtime.engines.gpu_array import GpuArray
from splitc.runtime.errors import EngineError
from splitc.runtime.gpus import need_cupy

# CUDA's type for each of numpy's, and the one to compute in.
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
# Headers of types that CUDA does not know by itself. CuPy brings that of `__half`; the other comes with CUDA's runtime.
HEADERS = {"__nv_bfloat16": "#include <cuda_bf16.h>", "__half": "#include <cuda_fp16.h>"}
OPERATIONS = {"sum": "total + part", "max": "total > part ? total : part"}
THREADS = 256
# Bytes that a thread reads of each part at once: as many as one instruction does.
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
    """Write the sum, or the greatest, of parts of `size` elements to `whole`, on CuPy's current GPU and stream.

    The parts are taken in their order, so the bits are the same on all GPUs. Raises EngineError for a number type that
    can't be summed, and where CuPy can't compile.
    """
    if whole.dtype not in TYPES:
        raise EngineError(f"can't sum {whole.dtype} over GPUs")
    kernel = _compile(operation, whole.dtype, len(parts))
    _launch(kernel, [*(part.pointer for part in parts), whole.pointer], size, whole.nbytes // size)


def copy(target: int, source: int, size: int) -> None:
    """Copy so many bytes from one address to another, either of which may be in pinned memory or on another GPU.

    That is the sum of one part. Raises EngineError where CuPy can't compile.
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
    except Exception as error:  # of CuPy's several, none of which says what to do
        raise EngineError(
            "CuPy can't compile what copies and sums over GPUs; its compiler is NVRTC, pip install "
            f"nvidia-cuda-nvrtc-cu12 (or nvidia-cuda-nvrtc with a driver of CUDA 13): {error}"
        ) from error
    return kernel
