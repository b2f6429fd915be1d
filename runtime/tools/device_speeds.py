"""Measure devices' floating point operations per second, and bytes read and written per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from splitc.runtime.hardware.devices import Device
from splitc.runtime.hardware.gpus import need_cupy
from splitc.runtime.hardware.machine import MeasuredSpeed, link_end
from splitc.runtime.hardware.profiles import PROFILES

# Rows and columns of the matrices.
CPU_SIDE, GPU_SIDE = 512, 8192
# Rows of the product that only computes. Measured on an H100, in TFLOP/s: 585 with 512 rows, whose matrices take half
# as long to be read, 741 with 8192.
GPU_ROWS = 4096
# Products that are timed together, each of one row with a matrix that no cache holds. They follow each other as in a
# replayed token: one alone is a third slower on an H200, since its start and its end leave the memory idle.
GPU_READS = 8
# Bytes of the copied arrays: many times the size of a cache, and few enough for one.
CPU_BYTES, CACHED_BYTES = 1 << 27, 1 << 20
# The least runs of a measurement, and the least seconds: cores that were idle take a while to reach their speed.
RUNS, LEAST = 10, 0.2


def measure_speeds(devices: Sequence[Device]) -> dict[str, MeasuredSpeed]:
    """The speeds of the devices by name, with all CPU devices together as `cpu`. Takes about a second for each."""
    once = {link_end(device): device for device in devices}
    return {name: _cpu_speed() if name == "cpu" else _gpu_speed(device.index) for name, device in once.items()}


def _cpu_speed() -> MeasuredSpeed:
    matrix = np.ones((CPU_SIDE, CPU_SIDE), np.float32)
    product = np.empty_like(matrix)

    def seconds(work: Callable[[], Any]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def copied(size: int) -> float:
        source = np.ones(size, np.uint8)
        target = np.empty_like(source)
        return 2 * size / _best(seconds, lambda: np.copyto(target, source))

    multiplying = _best(seconds, lambda: np.matmul(matrix, matrix, out=product))
    large = np.ones((CPU_BYTES // 4 // CPU_SIDE, CPU_SIDE), np.float32)
    reading = _best(seconds, lambda: np.matmul(large, matrix[0]))
    flops, together = 2 * CPU_SIDE**3 / multiplying, CPU_BYTES / reading
    return MeasuredSpeed(flops, copied(CPU_BYTES), copied(CACHED_BYTES), together)


def _gpu_speed(index: int) -> MeasuredSpeed:
    """By a product of many rows, which computes, and by products of one row, which read the matrix.

    The time to start a kernel is not part of either. Numbers are random: a GPU multiplies ones a sixth faster.
    """
    cupy = need_cupy()
    drawn = np.random.default_rng(0).standard_normal((GPU_ROWS, GPU_SIDE), np.float32).astype(np.float16)
    with cupy.cuda.Device(index), cupy.cuda.Stream(non_blocking=True) as stream:
        try:
            rows, row = cupy.asarray(drawn), cupy.asarray(drawn[:1])
            matrix, other = (cupy.asarray(np.resize(drawn, (GPU_SIDE, GPU_SIDE))) for _ in range(2))
        except cupy.cuda.memory.OutOfMemoryError:  # other processes use its memory
            return MeasuredSpeed()

        def seconds(work: Callable[[], Any]) -> float:
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record(stream)
            work()
            end.record(stream)
            end.synchronize()
            return float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3

        try:
            multiplying = _best(seconds, lambda: cupy.matmul(rows, matrix))
            reading = _best(seconds, lambda: [cupy.matmul(row, weight) for weight in GPU_READS // 2 * (matrix, other)])
        except Exception:  # of any kind, if CuPy finds no cuBLAS
            return MeasuredSpeed()
        reading -= GPU_READS * PROFILES["cuda"].launch
        return MeasuredSpeed(2 * drawn.size * GPU_SIDE / multiplying, GPU_READS * matrix.nbytes / reading)


def _best(seconds: Callable[[Callable[[], Any]], float], work: Callable[[], Any]) -> float:
    """The seconds of the best of several runs, since other load can only make a run slower."""
    best, count, until = seconds(work), 1, time.perf_counter() + LEAST
    while count < RUNS or time.perf_counter() < until:
        best, count = min(best, seconds(work)), count + 1
    return best
