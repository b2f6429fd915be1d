"""Weights in GPU memory that sessions do not allocate: shared by several of ONNX Runtime's, or copied in in turn."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary, ref

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from splitc.runtime.gpu.device import GpuDevice
from splitc.runtime.gpu.weight_places import SwapBuffer, lay_out, size_of
from splitc.runtime.package.manifest import Weight
from splitc.runtime.threads.futures import Executor

Bytes = npt.NDArray[np.uint8]
# bfloat16, which DLPack has, but not CuPy: its code and CuPy's type.
BFLOAT, BITS = 4, "uint16"
# What is called with weights that have memory, before they are copied.
Allocated = Callable[[Iterable[ort.OrtValue]], None]
# Where the code of the number type is in DLPack's DLManagedTensor (dlpack.h: after a pointer and three int32).
CODE_AT = 20
# Threads that copy weights to the GPU, and the most bytes of a copy. The driver copies pageable memory on one core, at
# 9 GB/s on an H200's host; four threads that copy it to pinned memory themselves reach 32 GB/s.
COPYING, PIECE = 4, 8 << 20


# The weights that several models have, by the GPU's number and their keys, as long as an engine of this process does.
_common: WeakValueDictionary[tuple[int, str], ort.OrtValue] = WeakValueDictionary()
# For each GPU, so that none of these is placed twice.
_placing: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)


def _ignore(weights: Iterable[ort.OrtValue]) -> None:
    pass


def place_weights(
    gpu: GpuDevice, folder: Path, weights: Sequence[Weight], allocated: Allocated = _ignore
) -> Mapping[str, ort.OrtValue]:
    """The weights in the GPU's memory, by name. Their files lie in `folder`. Waits for the copies.

    `allocated` is called with those that have no key before they are copied. A weight with a key is placed once in this
    process, for all engines. Raises EngineError if there is not enough memory.
    """
    own = _place(gpu, folder, [weight for weight in weights if not weight.key], allocated)
    with _placing[gpu.index]:
        # Values, not only their keys: no other thread may drop the last one meanwhile.
        there = {key: value for (index, key), value in _common.items() if index == gpu.index}
        missing = {weight.key: weight for weight in weights if weight.key and weight.key not in there}
        made = _place(gpu, folder, list(missing.values()), _ignore)
        there.update((weight.key, made[weight.name]) for weight in missing.values())
        _common.update({(gpu.index, key): value for key, value in there.items()})
    return {weight.name: there[weight.key] if weight.key else own[weight.name] for weight in weights}


def _place(gpu: GpuDevice, folder: Path, weights: Sequence[Weight], allocated: Allocated) -> Mapping[str, ort.OrtValue]:
    """The weights in one allocation."""
    if not weights:
        return {}
    sizes = list(map(size_of, weights))
    starts, whole = lay_out(sizes)
    memory = gpu.allocate(whole)
    places = [gpu.cuda.MemoryPointer(memory, start) for start in starts]
    with gpu.device:
        made = {weight.name: make_value(gpu, weight, place) for weight, place in zip(weights, places, strict=True)}
    allocated(made.values())
    files = {name: np.memmap(folder / name, np.uint8, "r") for name in {weight.file for weight in weights}}
    pieces = [
        (place.ptr + start, files[weight.file][weight.offset + start : weight.offset + min(size, start + PIECE)])
        for weight, size, place in zip(weights, sizes, places, strict=True)
        for start in range(0, size, PIECE)
    ]
    with Executor(COPYING) as pool:
        list(pool.map(partial(_copy, gpu, pieces), range(COPYING)))
    return made


def _copy(gpu: GpuDevice, pieces: Sequence[tuple[int, Bytes]], first: int) -> None:
    """Copy every few pieces, from the first one on: while one is copied to the GPU, the next one is read."""
    runtime = gpu.cuda.runtime
    with gpu.device, gpu.cuda.Stream(non_blocking=True) as stream:
        staged = itertools.cycle([(gpu.pinned((PIECE,), np.dtype(np.uint8)), gpu.cuda.Event()) for _ in range(2)])
        for number, (target, source) in enumerate(pieces[first::COPYING]):
            buffer, copied = next(staged)
            if number > 1:
                copied.synchronize()
            buffer[: source.size] = source
            runtime.memcpyAsync(target, buffer.ctypes.data, source.size, runtime.memcpyHostToDevice, stream.ptr)
            copied.record(stream)
        stream.synchronize()


def make_value(gpu: GpuDevice, weight: Weight, place: Any) -> ort.OrtValue:
    """The weight at this CuPy pointer, as a value that keeps the memory alive."""
    is_bfloat = weight.dtype == "bfloat16"
    array = gpu.cupy.ndarray(tuple(weight.shape), BITS if is_bfloat else weight.dtype, place)
    return ort.OrtValue.from_dlpack(_as_bfloat(array.__dlpack__()) if is_bfloat else array)


def _as_bfloat(capsule: Any) -> Any:
    """The DLPack capsule of 16-bit numbers, relabelled as bfloat16."""
    find = ctypes.pythonapi.PyCapsule_GetPointer
    find.restype, find.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    ctypes.c_uint8.from_address(find(capsule, b"dltensor") + CODE_AT).value = BFLOAT
    return capsule


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

    Those of each model wait in pinned host memory, and are copied to one shared GPU buffer in turn. Addresses never
    change, so that sessions and recorded CUDA graphs stay valid. Their files lie in `folder`. A new object's weights
    are in the buffer. Raises EngineError if there is not enough memory.
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
