"""A rank's measured memory, and the prediction."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct


class RankMemory(Struct, frozen=True):
    """Bytes that a rank uses beyond what it had before loading: with loaded engines, and at the peak.

    The peak includes loading and running. Predicted are the same (weights and the engines' own memory when loaded;
    activations and caches beside them when running), and of these the weights alone.
    """

    device: str
    loaded: int
    peak: int
    predicted_weights: int
    predicted_loaded: int
    predicted_total: int

    @property
    def unaccounted(self) -> int:
        """The measured peak minus the predicted one."""
        return self.peak - self.predicted_total


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in use on a device or by a process: now, at the peak so far, and, of those now, in mapped files."""

    now: int
    peak: int
    mapped: int = 0


def process_memory() -> MemoryUse:
    """The memory of this process, at the peak without what it shares with others: ranks as threads share nothing."""
    status = _status()
    if "VmHWM" not in status:  # macOS, and sandboxes whose /proc does not say
        import resource

        import psutil  # takes 20 ms

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return MemoryUse(psutil.Process().memory_info().rss, peak)
    # getrusage would include the memory of the parent process when it forked.
    peak = max(0, status["VmHWM"] - status.get("RssShmem", 0))
    return MemoryUse(status["VmRSS"], peak, status.get("RssFile", 0))


def _status() -> dict[str, int]:
    """The bytes in Linux's status of this process, by entry; empty on other systems."""
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
