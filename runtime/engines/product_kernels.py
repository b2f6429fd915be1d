"""Loads cuBLAS's kernels for matrix products with any number of rows, before requests need them.

cuBLAS chooses a kernel by the number of rows, and CUDA loads a kernel at its first launch, which takes some 4 ms. So
each prompt of a new length would wait for kernels. A background thread launches the products with many numbers of rows,
on whatever the memory holds: while an engine is loaded, from the allocation of its weights on, and while the rank is
idle.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Sequence
from itertools import product as pairs
from typing import Any

import numpy as np
import onnxruntime as ort

from splitc.runtime.errors import EngineError
from splitc.runtime.gpu.device import CLOSING, GpuDevice
from splitc.runtime.package.products import Product

# Numbers of rows are multiples of the first step up to the most, then of the next step: requests may come before all
# are computed. A choice: of 40 prompts of new lengths, 7 waited for kernels between multiples of 16, and 5 for kernels
# between multiples of 8. Longer prompts take so long that to load a kernel is little.
STEPS, MOST = (128, 64, 32, 16, 8), 1024
# The least bytes of weights for which it pays. A choice: the kernels take up to 0.2 GiB.
LEAST_WEIGHTS = 1 << 30
# The most bytes of a product's result.
RESULT = 32 << 20
# Seconds without requests after which kernels are loaded. A choice: longer than between the tokens of an answer, as a
# request waits while a kernel is loaded.
QUIET = 0.05
# CUDA's numbers of types (library_types.h), and cuBLAS's of computing in single precision, of a factor as it is stored
# and transposed, and of its own choice of a kernel (cublas_api.h). ONNX Runtime's products have the same ones.
TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
SINGLE, PLAIN, TRANSPOSED, OWN_CHOICE = 68, 0, 1, -1


class ProductKernels:
    """Loads kernels of products on one GPU, once for each product. To be closed before the GPU's memory is freed."""

    def __init__(self, gpu: GpuDevice) -> None:
        self._gpu = gpu
        self._asked: set[Product] = set()
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        # When the last request ended; infinite during a request.
        self._quiet_since = -math.inf

    def load(self, products: Iterable[Product], weights: Iterable[ort.OrtValue], limit: int | None = None) -> None:
        """Begin to load the kernels of an engine's products, if its weights on the GPU are large. Does not wait.

        The weights and the results together take no more than `limit` bytes, if it is given. If a product fails, the
        GPU gets a note.
        """
        held = sorted(weights, key=ort.OrtValue.tensor_size_in_bytes)
        size = sum(weight.tensor_size_in_bytes() for weight in held)
        room = RESULT if limit is None else min(RESULT, limit - size)
        missing = [product for product in products if product not in self._asked]
        if missing and room > 0 and size >= LEAST_WEIGHTS:
            self._asked.update(missing)
            # Python does not wait for it at exit: a GPU may hang.
            work = missing, held[-1], room
            self._threads.append(
                threading.Thread(target=self._compute_all, args=work, name="splitc kernels", daemon=True)
            )
            self._threads[-1].start()

    def pause(self) -> None:
        """To be called when a request begins."""
        self._quiet_since = math.inf

    def resume(self) -> None:
        """To be called when a request has ended."""
        self._quiet_since = time.monotonic()

    def close(self) -> None:
        """Stop, and wait for the last product, unless the GPU hangs."""
        self._closed.set()
        for thread in self._threads:
            thread.join(CLOSING)

    def _compute_all(self, products: Sequence[Product], memory: ort.OrtValue, room: int) -> None:
        """Compute the products until there are no more, or this is closed. Both factors are read from `memory`."""
        gpu, size = self._gpu, memory.tensor_size_in_bytes()
        try:
            blas, result = gpu.cuda.cublas, gpu.allocate(room)
            with gpu.device, gpu.cuda.Stream(non_blocking=True) as stream:
                handle = blas.create()
                try:
                    for rows, product in pairs(row_counts(), products):
                        if not _fits(product, rows, size, room):
                            continue
                        if not self._wait_quiet():
                            break
                        _compute(blas, handle, product, rows, memory.data_ptr(), result.ptr)
                    stream.synchronize()
                finally:
                    blas.destroy(handle)
        except (EngineError, RuntimeError, ImportError) as error:  # CuPy's errors of CUDA and cuBLAS are RuntimeErrors
            gpu.notes.append(f"{gpu.name} loads kernels for products when they are needed: {error}")

    def _wait_quiet(self) -> bool:
        """Wait until there are no requests. Returns False if this is closed."""
        while time.monotonic() - self._quiet_since < QUIET:
            if self._closed.wait(QUIET):
                break
        return not self._closed.is_set()


def row_counts() -> list[int]:
    """The numbers of rows, in the order in which they are computed."""
    return list(dict.fromkeys(rows for step in STEPS for rows in range(step, MOST + 1, step)))


def _fits(product: Product, rows: int, memory: int, result: int) -> bool:
    """Whether the factors are no longer than the memory that is read, and the result is no longer than its own."""
    longest = product.inner * max(rows, product.columns)
    return longest * product.item_bytes <= memory and rows * product.columns * product.item_bytes <= result


def _compute(blas: Any, handle: int, product: Product, rows: int, factors: int, result: int) -> None:
    """Launch a product as ONNX Runtime does: cuBLAS stores by columns, so the weight is its first factor."""
    kind, order = TYPES[product.dtype], TRANSPOSED if product.transposed else PLAIN
    inner, columns = product.inner, product.columns
    one, zero = np.ones((), np.float32), np.zeros((), np.float32)
    weight = factors, kind, inner if product.transposed else columns
    blas.gemmEx(
        *(handle, order, PLAIN, columns, rows, inner, one.ctypes.data),
        *(*weight, factors, kind, inner, zero.ctypes.data, result, kind, columns, SINGLE, OWN_CHOICE),
    )
