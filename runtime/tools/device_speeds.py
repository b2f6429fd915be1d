"""Measure devices' floating point operations per second, and bytes read and written per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from splitc.runtime.devices import Device
from splitc.runtime.gpus import need_cupy
from splitc.runtime.machine import MeasuredSpeed, link_end

# Rows and columns of the matrices, and bytes of the copied arrays: many times the size of a cache.
CPU_SIDE, GPU_SIDE = 512, 8192
CPU_BYTES, GPU_BYTES = 1 << 27, 1 << 30
# The best of this many runs counts, since other load can only make a run slower.
RUNS = 5


def measure_speeds(devices: Sequence[Device]) -> dict[str, MeasuredSpeed]:
    """The speeds of the devices by name, with all CPU devices together as `cpu`. Takes less than a second for each."""
    once = {link_end(device): device for device in devices}
    return {name: _cpu_speed() if name == "cpu" else _gpu_speed(device.index) for name, device in once.items()}


def _cpu_speed() -> MeasuredSpeed:
    matrix = np.ones((CPU_SIDE, CPU_SIDE), np.float32)
    product = np.empty_like(matrix)
    source = np.ones(CPU_BYTES, np.uint8)
    target = np.empty_like(source)

    def seconds(work: Callable[[], Any]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return _speed(
        seconds, lambda: np.matmul(matrix, matrix, out=product), CPU_SIDE, lambda: np.copyto(target, source), CPU_BYTES
    )


def _gpu_speed(index: int) -> MeasuredSpeed:
    cupy = need_cupy()
    with cupy.cuda.Device(index), cupy.cuda.Stream(non_blocking=True) as stream:
        try:
            matrix = cupy.ones((GPU_SIDE, GPU_SIDE), "float16")
            source = cupy.ones(GPU_BYTES, "uint8")
            target = cupy.empty_like(source)
        except cupy.cuda.memory.OutOfMemoryError:  # other processes use its memory
            return MeasuredSpeed()

        def seconds(work: Callable[[], Any]) -> float:
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record(stream)
            work()
            end.record(stream)
            end.synchronize()
            return float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3

        return _speed(
            seconds, lambda: cupy.matmul(matrix, matrix), GPU_SIDE, lambda: cupy.copyto(target, source), GPU_BYTES
        )


def _speed(
    seconds: Callable[[Callable[[], Any]], float],
    multiply: Callable[[], Any],
    side: int,
    copy: Callable[[], Any],
    size: int,
) -> MeasuredSpeed:
    """The speed from the seconds of a product of square matrices, and of a copy of `size` bytes."""
    copying = min(seconds(copy) for _ in range(RUNS))
    try:
        multiplying = min(seconds(multiply) for _ in range(RUNS))
    except Exception:  # of any kind, if CuPy finds no cuBLAS
        return MeasuredSpeed(None, 2 * size / copying)
    return MeasuredSpeed(2 * side**3 / multiplying, 2 * size / copying)
