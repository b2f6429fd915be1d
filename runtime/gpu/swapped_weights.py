"""Swapped weights: those of each model wait in pinned host memory, and are copied to one shared GPU buffer in turn.

Addresses never change, so that sessions and recorded CUDA graphs stay valid.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from weakref import WeakValueDictionary, ref

import numpy as np
import onnxruntime as ort

from splitc.runtime.gpu.device import GpuDevice
from splitc.runtime.gpu.weight_places import SwapBuffer, lay_out, size_of
from splitc.runtime.gpu.weights import COPYING, make_value
from splitc.runtime.package.manifest import Weight
from splitc.runtime.threads.futures import Executor


class _Buffer:
    """The memory on a GPU, and the owner of the weights in it."""

    def __init__(self, gpu: GpuDevice, size: int) -> None:
        self.chunk = gpu.allocate(size)
        self.size = size
        self.holds: ref[SwappedWeights] | None = None


# By the GPU's number and the pipeline's, as long as a model has weights in it.
_buffers: WeakValueDictionary[tuple[int, int], _Buffer] = WeakValueDictionary()
_making = threading.Lock()


class SwappedWeights:
    """The swapped weights of a rank's engine. `values` are valid from `bring_in` until another model's `bring_in`.

    Their files lie in `folder`. A new object's weights are in the buffer. Raises EngineError if there is not enough
    memory.
    """

    def __init__(self, gpu: GpuDevice, buffer: SwapBuffer, folder: Path, weights: Sequence[Weight]) -> None:
        starts, size = lay_out(map(size_of, weights))
        gpu.free_unused()
        with _making:
            key = gpu.index, buffer.pipeline
            shared = _buffers.get(key) or _Buffer(gpu, max(buffer.bytes, size))
            _buffers[key] = shared
        assert size <= shared.size, "the buffer is as large as the largest model's weights"
        self._gpu, self._buffer = gpu, shared
        self._pinned = gpu.pinned_alone(size)
        files = {name: np.memmap(folder / name, np.uint8, "r") for name in {weight.file for weight in weights}}

        def read(weight: Weight, start: int) -> None:
            length = size_of(weight)
            self._pinned[start : start + length] = files[weight.file][weight.offset : weight.offset + length]

        with Executor(COPYING) as pool:
            list(pool.map(read, weights, starts))
        with gpu.device:
            places = [gpu.cuda.MemoryPointer(shared.chunk, start) for start in starts]
            self.values: Mapping[str, ort.OrtValue] = {
                weight.name: make_value(gpu, weight, place) for weight, place in zip(weights, places, strict=True)
            }
        self.bring_in()

    @property
    def is_in(self) -> bool:
        """Whether the weights are in the buffer."""
        return self._buffer.holds is not None and self._buffer.holds() is self

    def bring_in(self) -> None:
        """Copy the weights in, once the previous owner's work is done. Waits for the copy."""
        gpu, buffer = self._gpu, self._buffer
        if self.is_in:
            return
        gpu.free_unused()
        before = None if buffer.holds is None else buffer.holds()
        if before is not None:
            before._gpu.wait_all()
        buffer.holds = None  # if the copy fails
        runtime = gpu.cuda.runtime
        runtime.memcpyAsync(
            buffer.chunk.ptr, self._pinned.ctypes.data, self._pinned.nbytes, runtime.memcpyHostToDevice, gpu.stream.ptr
        )
        gpu.wait_all()
        buffer.holds = ref(self)
