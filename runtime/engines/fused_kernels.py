"""Fused operators of an engine on a GPU: kernels that are compiled while it is loaded (see `fused_source`).

In the engine's file each is a function of ONNX operators too. Without the C library, or if CuPy can't compile them,
ONNX Runtime runs these functions.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from splitc.runtime.arrays.onnx_types import KNOWN
from splitc.runtime.engines.fused_source import launch_of, source_of
from splitc.runtime.engines.operator_library import is_built, library_path, load_library
from splitc.runtime.gpu.device import GpuDevice
from splitc.runtime.package.fused import INPUTS, LONGEST_NAME, Fused
from splitc.runtime.threads.failures import Failure, attempt


class _Kernel(ctypes.Structure):
    """The C library's `FusedKernel`."""

    _fields_ = (
        ("name", ctypes.c_char * (LONGEST_NAME + 1)),
        ("function", ctypes.c_void_p),
        ("type", ctypes.c_int),
        ("inputs", ctypes.c_uint),
        ("integers", ctypes.c_uint),
        ("whole", ctypes.c_uint),
        ("looked_up", ctypes.c_uint),
        ("columns", ctypes.c_uint),
        ("rows", ctypes.c_uint),
        ("threads", ctypes.c_uint),
        ("widths", ctypes.c_uint * INPUTS),
    )


class FusedOperators:
    """The operators of these kernels, of which `functions` are the compiled ones, in the same order.

    On a GPU `launch` is the address of CUDA's cuLaunchKernel. Raises EngineError if there is no memory left.
    """

    def __init__(self, kernels: Sequence[Fused], functions: Sequence[int], launch: int, on_gpu: bool = True) -> None:
        described = (_Kernel * len(kernels))(*map(_describe, kernels, functions))
        self._pointer = load_library().splitc_fused_make(described, len(kernels), int(on_gpu), launch)
        # What has the functions.
        self.module: object = None

    def release(self) -> None:
        """Let the operators go, once no session has them any more. No session may be made with them afterwards."""
        load_library().splitc_fused_release(self._pointer)

    @contextlib.contextmanager
    def registered(self) -> Iterator[Path]:
        """The library's path. Sessions that this thread makes inside the context have these operators."""
        library = load_library()
        library.splitc_fused_register(self._pointer)
        try:
            yield library_path()
        finally:
            library.splitc_fused_register(None)


def compile_fused(gpu: GpuDevice, kernels: Sequence[Fused]) -> FusedOperators | None:
    """The operators of these kernels on a GPU; None if there are none.

    Also None if they can't be made: then `gpu` gets a note.
    """
    if not kernels or not is_built():
        return None
    made: FusedOperators | Failure = attempt(partial(_compile, gpu, kernels))
    if isinstance(made, Failure):
        gpu.notes.append(f"{gpu.name} runs {len(kernels)} fused operators node by node: {made.error}")
        return None
    return made


def _compile(gpu: GpuDevice, kernels: Sequence[Fused]) -> FusedOperators:
    module = gpu.cupy.RawModule(code=source_of(kernels))
    functions = [module.get_function(kernel.name).kernel.ptr for kernel in kernels]
    launch = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchKernel, ctypes.c_void_p).value
    made = FusedOperators(kernels, functions, launch or 0)
    made.module = module  # it has the kernels
    return made


def _describe(kernel: Fused, function: int) -> _Kernel:
    launch = launch_of(kernel.columns)
    widths = [given.width for given in kernel.inputs]

    def bits(*spans: str) -> int:
        return sum(1 << number for number, given in enumerate(kernel.inputs) if given.span in spans)

    return _Kernel(
        kernel.name.encode(),
        function,
        KNOWN[kernel.dtype],
        len(widths),
        bits("positions"),
        bits("all"),
        bits("positions", "table"),
        kernel.columns,
        launch.rows,
        launch.threads * launch.rows,
        (ctypes.c_uint * INPUTS)(*widths),
    )
