"""Whether a session's ranks are threads of its process or processes of their own."""

from __future__ import annotations

from collections.abc import Sequence

from splitc.runtime.devices import Device
from splitc.runtime.engines.kinds import has_gpu_each
from splitc.runtime.errors import MisuseError

THREADS, PROCESSES = "threads", "processes"


def use_processes(asked: str | None, devices: Sequence[Device]) -> bool:
    """Whether the ranks are processes: as asked for, or else on several GPUs, where each rank has one of its own.

    Raises MisuseError for an unknown word, and for processes on devices that can't exchange values: NCCL connects GPUs
    of one rank each.
    """
    if asked not in (None, THREADS, PROCESSES):
        raise MisuseError(f"ranks are '{THREADS}' or '{PROCESSES}', not '{asked}'")
    if asked == PROCESSES and not has_gpu_each(devices) and any(device.kind == "cuda" for device in devices):
        names = ", ".join(map(str, devices))
        raise MisuseError(f"ranks as processes need a GPU each, or no GPU at all, and these are {names}: use threads")
    if asked is None:
        return has_gpu_each(devices)
    return asked == PROCESSES
