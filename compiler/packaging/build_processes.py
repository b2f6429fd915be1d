"""Divides engines among processes that build side by side, and starts and ends these."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO

import onnx_ir as ir

from splitc.compiler.packaging.build_messages import Job
from splitc.runtime.hardware.devices import cores, host_memory

# The memory of a process that builds: its libraries, and the engine's weights times COPIES. TensorRT-RTX 1.7 took 0.6
# GiB and 1.5 times the weights.
LIBRARIES, COPIES = 1 << 30, 2


def divide_jobs(jobs: Sequence[Job], at_once: int | None, gpus: int | None = None) -> list[list[Job]]:
    """The jobs of each process. There are at most `at_once` (None: one per core), and as many as memory allows.

    If kernels are measured, on this number of `gpus`, jobs of one GPU run one after another.
    """
    free = host_memory()[1]
    sizes = sorted((LIBRARIES + COPIES * _weight_bytes(job) for job in jobs), reverse=True)
    count = min(at_once or cores(), len(jobs))
    while count > 1 and sum(sizes[:count]) > free:
        count -= 1
    parts: list[list[Job]] = [[] for _ in range(count)]
    for place, job in enumerate(jobs):
        parts[(place if gpus is None else min(job.gpu, gpus - 1)) % count].append(job)
    return [part for part in parts if part]


def _weight_bytes(job: Job) -> int:
    values = ir.load(job.source).graph.initializers.values()
    return sum(value.const_value.nbytes for value in values if value.const_value is not None)


class Processes:
    """Processes that are ended together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: list[subprocess.Popen[bytes]] = []
        self._ended = False

    def start(self, command: Sequence[str], log: IO[bytes], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a process that talks over its standard input and output. After `end`, it is killed at once."""
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, env=environment)
        with self._lock:
            self._started.append(process)
            if self._ended:
                process.kill()
        return process

    def end(self) -> None:
        """Kill all processes."""
        with self._lock:
            self._ended = True
            for process in self._started:
                process.kill()
