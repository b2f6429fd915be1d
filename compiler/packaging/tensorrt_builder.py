"""Builds TensorRT engines from ONNX files, in separate processes.

Separate processes are needed because polygraphy chooses between TensorRT and TensorRT-RTX once, when it is imported; to
free the memory of a build; and because TensorRT may crash its process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import msgspec
import onnx_ir as ir

from splitc.compiler.packaging.build_messages import Failed, Finished, Job, Message, Order, Progress, Refusal
from splitc.compiler.packaging.building import BuildError
from splitc.runtime.engines.kinds import TENSORRT, TENSORRT_RTX, find_kind
from splitc.runtime.errors import MisuseError
from splitc.runtime.hardware.devices import cores, host_memory
from splitc.runtime.hardware.gpus import list_gpus
from splitc.runtime.ipc.child_python import python_command
from splitc.runtime.package.manifest import BuildOptions, Built
from splitc.runtime.threads.futures import Executor, first_error
from splitc.runtime.threads.progress import telling
from splitc.runtime.units import plural

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


# The prefix of engine files with collectives inside, by Triton's per-rank layout.
PER_RANK = "model.plan.rank"
# How many nodes an error lists.
LISTED = 8


class TensorrtBuilder:
    """Builds engines of TensorRT and TensorRT-RTX."""

    def check_here(self, engine: str) -> None:
        if engine == TENSORRT and not list_gpus():
            raise MisuseError(
                "TensorRT builds engines on the GPU that they are for, and this machine has none: write the package "
                "with --build later and finish it there with 'splitc build PACKAGE', or use --engine tensorrt-rtx, "
                "which builds here for RTX GPUs, or --engine onnxruntime, which builds nothing"
            )

    def engine_path(self, folder: Path, stage: str, group: Sequence[int]) -> Path:
        """A file beside the engine's source, with Triton's name if the engine has collectives inside."""
        return folder / (f"{PER_RANK}{folder.name.removeprefix('rank')}" if group else f"{stage}.engine")

    def build(
        self,
        engine: str,
        jobs: Sequence[Job],
        options: BuildOptions,
        timing_cache: Path,
        at_once: int | None = None,
    ) -> Built:
        # TensorRT-RTX measures no kernels when it builds.
        cache = str(timing_cache) if engine == TENSORRT else None
        parts = divide_jobs(jobs, at_once, len(list_gpus()) if engine == TENSORRT else None)
        return build_engines([Order(engine, part, options, cache) for part in parts])

    def find_refused(self, engine: str, jobs: Sequence[Job]) -> list[tuple[Job, Refusal]]:
        order = Order(engine, list(jobs), BuildOptions(), None)
        with _messages(order, Processes()) as messages:
            failed = [message for message in messages if isinstance(message, Failed)]
        return [(order.jobs[message.job], refusal) for message in failed for refusal in message.refused]


BUILDER = TensorrtBuilder()


def build_engines(orders: Sequence[Order]) -> Built:
    """Build the engines of several orders at once. Returns the versions that built them.

    Raises MisuseError if TensorRT is not installed. Raises BuildError, which names the stage, the block and the node,
    if TensorRT does not support a node or can't build an engine. All processes are ended then.
    """
    done, lock, processes = [0.0] * len(orders), threading.Lock(), Processes()
    tell, total = telling("building engines"), sum(len(order.jobs) for order in orders)

    def build(place: int, order: Order) -> Built:
        def report(progress: Progress) -> None:
            with lock:  # TensorRT's phases may get more steps than announced
                done[place] = max(done[place], progress.job + progress.done)
                tell(sum(done), total)

        return _build(order, processes, report)

    with Executor(len(orders), "splitc builds") as pool:
        running = [pool.submit(build, *numbered) for numbered in enumerate(orders)]
        try:
            if (error := first_error(running)) is not None:
                raise error
        finally:
            processes.end()
    tell(total, total)
    return running[0].result()


def _build(order: Order, processes: Processes, progress: Callable[[Progress], None]) -> Built:
    built = None
    with _messages(order, processes) as messages:
        for message in messages:
            if isinstance(message, Failed):
                raise BuildError(_explain(order, message))
            if isinstance(message, Progress):
                progress(message)
            else:
                built = message.built
    assert built is not None, "a process that ends well says so"
    return built


@contextmanager
def _messages(order: Order, processes: Processes) -> Iterator[Iterator[Message]]:
    """Start the process, iterate over its messages, and end it. Raises BuildError if it dies."""
    find_kind(order.kind).need_installed()
    command = python_command("from splitc.compiler.packaging.tensorrt_process import main", "main()")
    environment = {**os.environ, "POLYGRAPHY_USE_TENSORRT_RTX": "1" if order.kind == TENSORRT_RTX else "0"}
    with tempfile.TemporaryFile() as log, processes.start(command, log, environment) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            with suppress(BrokenPipeError):  # the process has died: `_read` reports its last words
                process.stdin.write(msgspec.json.encode(order))
                process.stdin.close()
            yield _read(order, process, log)
        finally:
            process.kill()  # an error or an interrupt here must end the build too


def _read(order: Order, process: subprocess.Popen[bytes], log: IO[bytes]) -> Iterator[Message]:
    job = 0
    assert process.stdout is not None
    for line in process.stdout:
        message: Message = msgspec.json.decode(line, type=Message)
        job = message.job if isinstance(message, Progress) else job
        yield message
        if isinstance(message, Finished):
            return
    code = process.wait()
    log.seek(0)
    last_words = log.read().decode(errors="replace").strip().splitlines()[-3:]
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    hint = " (out of host memory, most likely)" if code == -signal.SIGKILL else ""
    raise BuildError(f"{order.kind} {how}{hint} while it built {order.jobs[job].where}:\n" + "\n".join(last_words))


def _explain(order: Order, failed: Failed) -> str:
    where = order.jobs[failed.job].where
    if failed.message:
        named = f"\nIt names {', '.join(map(str, failed.refused[:LISTED]))}." if failed.refused else ""
        return (
            f"{order.kind} can't build {where}: {failed.message}{named}\nIf it ran out of memory, allow more with "
            "--workspace, or plan for smaller inputs (--shapes); else try another --builder-optimization-level, or "
            "--engine onnxruntime."
        )
    return (
        f"{order.kind} does not take {plural(len(failed.refused), 'node')} of {where}:\n"
        + "\n".join(f"  {refusal}: {refusal.reason}" for refusal in failed.refused[:LISTED])
        + ("\n  ..." if len(failed.refused) > LISTED else "")
        + "\nExport the model without such operators, or use --engine onnxruntime."
    )
