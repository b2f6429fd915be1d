"""TensorRT engines from ONNX files, built one after another in a process of their own.

A process, since polygraphy decides once, when it is imported, between TensorRT and TensorRT-RTX; since the memory of a
build is back when it ends; and since TensorRT, when it fails badly, ends the process that it is in.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

from splitc.runtime.engines.kinds import TENSORRT_RTX, need_installed
from splitc.runtime.errors import SplitcError
from splitc.runtime.manifest import BuildOptions, Built, Sizes

# Where a node of an ONNX file says which block of the model it is of.
BLOCK = "splitc.block"
# What an engine file of a rank that exchanges values inside is called: as Triton's per-rank layout wants it.
PER_RANK = "model.plan.rank"
# How many nodes an error lists.
LISTED = 8


class BuildError(SplitcError):
    """TensorRT can't take a piece of the model, or could not build it."""


class Job(Struct, frozen=True):
    """One engine to build: from the ONNX file `source` to the file `engine`, for a GPU. Without an engine, just parse.

    `where` names it for people.
    """

    source: str
    engine: str | None
    sizes: dict[str, Sizes]
    where: str
    gpu: int = 0


class Order(Struct, frozen=True):
    """What the process is told: engines of one kind, one after another."""

    kind: str
    jobs: list[Job]
    options: BuildOptions
    timing_cache: str | None


class Progress(Struct, frozen=True, tag="progress"):
    """How far the job of this number is, from 0 to 1."""

    job: int
    done: float


class Refusal(Struct, frozen=True):
    """A node that TensorRT does not take, by name, operator and block, and what it says."""

    node: str
    operator: str
    block: str
    reason: str

    def __str__(self) -> str:
        return f"{self.block}: '{self.node}' ({self.operator})"


class Failed(Struct, frozen=True, tag="failed"):
    """A job that came to nothing: the nodes that were refused, or what TensorRT said, and nodes that it named."""

    job: int
    refused: list[Refusal]
    message: str = ""


class Finished(Struct, frozen=True, tag="finished"):
    """All jobs are done."""

    built: Built


Message = Progress | Failed | Finished


def build_engines(order: Order, progress: Callable[[Progress], None] = lambda _: None) -> Built:
    """Build the engines of an order. Returns what built them.

    Raises MisuseError where TensorRT is not installed, BuildError naming the stage, the block and the node of what
    TensorRT can't take or build.
    """
    built = None
    with _messages(order) as messages:
        for message in messages:
            if isinstance(message, Failed):
                raise BuildError(_explain(order, message))
            if isinstance(message, Progress):
                progress(message)
            else:
                built = message.built
    assert built is not None, "a process that ends well says so"
    return built


def find_refused(order: Order) -> list[tuple[Job, Refusal]]:
    """The nodes that TensorRT's parser refuses of the jobs' ONNX files; nothing is built."""
    found = []
    with _messages(order) as messages:
        for message in messages:
            if isinstance(message, Failed):
                found += [(order.jobs[message.job], each) for each in message.refused]
    return found


@contextmanager
def _messages(order: Order) -> Iterator[Iterator[Message]]:
    """Start the process; gives what it says, and ends it. Raises BuildError when it dies."""
    need_installed(order.kind)
    command = [sys.executable, "-m", "splitc.compiler.packaging.tensorrt_process"]
    environment = {**os.environ, "POLYGRAPHY_USE_TENSORRT_RTX": "1" if order.kind == TENSORRT_RTX else "0"}
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment
        ) as process,
    ):
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(msgspec.json.encode(order))
            process.stdin.close()
            yield _read(order, process, log)
        finally:
            process.kill()  # whatever ends this, an error or an interrupt, ends the build


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
    said = log.read().decode(errors="replace").strip().splitlines()[-3:]
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    hint = " (out of host memory, most likely)" if code == -signal.SIGKILL else ""
    raise BuildError(f"{order.kind} {how}{hint} while it built {order.jobs[job].where}:\n" + "\n".join(said))


def _explain(order: Order, failed: Failed) -> str:
    where = order.jobs[failed.job].where
    if failed.message:
        named = f"\nIt speaks of {_list(failed.refused)}." if failed.refused else ""
        return (
            f"{order.kind} can't build {where}: {failed.message}{named}\nWhere it ran out of memory, allow more with "
            "--workspace, or plan for smaller inputs (--shapes); else try another --builder-optimization-level, or "
            "--engine onnxruntime."
        )
    return (
        f"{order.kind} does not take {len(failed.refused)} node{'s' * (len(failed.refused) != 1)} of {where}:\n"
        + "\n".join(f"  {each}: {each.reason}" for each in failed.refused[:LISTED])
        + ("\n  ..." if len(failed.refused) > LISTED else "")
        + "\nExport the model without such operators, or use --engine onnxruntime."
    )


def _list(nodes: Sequence[Refusal]) -> str:
    return ", ".join(map(str, nodes[:LISTED]))


def engine_path(folder: Path, stage: str, group: Sequence[int]) -> Path:
    """Where the engine of a stage's file goes: beside its source, under Triton's name where ranks meet inside."""
    return folder / (f"{PER_RANK}{folder.name.removeprefix('rank')}" if group else f"{stage}.engine")
