"""All-reduces over GPUs, by NCCL and by splitc's kernels: compares the results, and times them by size.

    python -m tests.gpu.sums --gpus 2

Each GPU has a process that sees only this GPU, as ranks do. A time is that of one of many sums in a CUDA graph.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Mapping
from functools import partial
from itertools import combinations
from multiprocessing import get_context
from statistics import median
from typing import Any

import numpy as np

from splitc.runtime.cli.terminal import out, table
from splitc.runtime.collectives import kernel_sums
from splitc.runtime.collectives.collectives import Collectives
from splitc.runtime.collectives.mail import ChannelMail, ProcessMail
from splitc.runtime.collectives.meeting import Meeting, shared_bytes
from splitc.runtime.collectives.nccl import NcclCommunicator
from splitc.runtime.engines.onnxruntime_gpu import OnnxRuntimeGpuBackend
from splitc.runtime.gpu.device import GpuDevice
from splitc.runtime.hardware.devices import Device
from splitc.runtime.ipc.channel import Channel
from splitc.runtime.ipc.shared_memory import create_memory, map_memory
from splitc.runtime.units import format_bytes, format_seconds

# Sums in a graph, and launches of the graph.
SUMS, LAUNCHES = 64, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--small", type=int, help="bytes that are one exchange (default: as where it is used)")
    parser.add_argument("--blocks", type=int, default=kernel_sums.LARGE_BLOCKS, help="of large sums")
    options = parser.parse_args()
    pairs = {pair: socket.socketpair() for pair in combinations(range(options.gpus), 2)}
    ends: dict[int, dict[int, int]] = {rank: {} for rank in range(options.gpus)}
    for (one, other), (ours, theirs) in pairs.items():
        ends[one][other], ends[other][one] = ours.detach(), theirs.detach()
    meeting = create_memory(shared_bytes(options.gpus))
    context = get_context("fork")  # nothing here has a CUDA context
    kernel_sums.LARGE_BLOCKS = options.blocks
    if options.small is not None:
        kernel_sums.small_bytes = lambda ranks: options.small
    processes = [context.Process(target=_rank, args=(rank, ends[rank], meeting)) for rank in ends]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    raise SystemExit(max(abs(process.exitcode or 0) for process in processes))


def _rank(rank: int, ends: Mapping[int, int], meeting: int) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    gpu = OnnxRuntimeGpuBackend(Device("cuda", rank, 0))
    gpu.attach()
    group = tuple(range(len(ends) + 1))
    meetings = {group: Meeting(len(group), map_memory(meeting))}
    mail = ProcessMail()
    for other, end in ends.items():
        mail.connect(other, Channel(end))
    ranks = Collectives(rank, len(group), ChannelMail(mail, 0, rank, group), meetings, gpu, True)
    nccl = ranks.create_communicator(group, uses_operators=True)
    assert isinstance(nccl, NcclCommunicator)
    if nccl.kernels is None:
        raise SystemExit(f"rank {rank}: {gpu.notes}")
    rows = table("bytes", "NCCL", "kernel", "x", right=("bytes", "x"))
    sizes = [2, 1000, 100_002, *(1 << bits for bits in range(11, kernel_sums.MOST.bit_length()))]
    for size in sizes:
        part = np.random.default_rng(rank).standard_normal(size // 2).astype(np.float16)
        given = gpu.upload(part)
        whole = gpu.empty(given.shape, given.dtype)
        for _ in range(3):
            nccl.kernels.sum(given, whole)
        parts = ranks.all_gather(group, part)
        expected = np.sum([each.astype(np.float32) for each in parts], axis=0).astype(np.float16)
        np.testing.assert_array_equal(gpu.download({"": whole})[""], expected)
        nccl.kernels.check()
        by_nccl = _time(gpu, ranks, group, partial(nccl.all_reduce, "sum", given, whole, gpu.stream.ptr))
        by_kernel = _time(gpu, ranks, group, partial(nccl.kernels.sum, given, whole))
        times = format_seconds(by_nccl), format_seconds(by_kernel), f"{by_nccl / by_kernel:.2f}"
        rows.add_row(format_bytes(size), *times)
    if rank == 0:
        out.print(rows)


def _time(gpu: GpuDevice, ranks: Collectives, group: Any, work: Callable[[], None]) -> float:
    """The seconds of one call, of many in a graph."""
    work()
    gpu.wait_all()
    gpu.stream.begin_capture(gpu.cuda.runtime.streamCaptureModeRelaxed)
    for _ in range(SUMS):
        work()
    graph = gpu.stream.end_capture()
    begin, end, taken = gpu.cuda.Event(), gpu.cuda.Event(), []
    ranks.all_gather(group, None)
    for _ in range(LAUNCHES):
        begin.record(gpu.stream)
        graph.launch(gpu.stream)
        end.record(gpu.stream)
        gpu.wait(end)
        taken.append(float(gpu.cuda.get_elapsed_time(begin, end)) / 1e3 / SUMS)
    return median(taken)


if __name__ == "__main__":
    main()
