"""Measure what devices do in a second: floating point operations, and bytes that they read and write."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from splitc.runtime.devices import Device
from splitc.runtime.gpus import need_cupy
from splitc.runtime.machine import MeasuredSpeed, link_end

# Rows and columns of the matrices, and bytes of the arrays that are copied: many times a cache's.
CPU_SIDE, GPU_SIDE = 512, 8192
CPU_BYTES, GPU_BYTES = 1 << 27, 1 << 30
# The best of so many: what else a machine does makes a run slower, and none faster.
RUNS = 5


def measure_speeds(devices: Sequence[Device]) -> dict[str, MeasuredSpeed]:
    """The speeds of the devices by name, of all CPU devices together as `cpu`. Takes well below a second for each."""
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
        except cupy.cuda.memory.OutOfMemoryError:  # others use it
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
    """From the seconds of a product of square matrices, and of a copy, which reads and writes so many bytes."""
    copying = min(seconds(copy) for _ in range(RUNS))
    try:
        multiplying = min(seconds(multiply) for _ in range(RUNS))
    except Exception:  # of any kind: CuPy finds no cuBLAS
        return MeasuredSpeed(None, 2 * size / copying)
    return MeasuredSpeed(2 * side**3 / multiplying, 2 * size / copying)
