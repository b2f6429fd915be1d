"""A served package's counters, on the server's page for Prometheus."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from splitc.runtime.hardware.devices import Device
from splitc.runtime.requests.metrics import Metrics


@dataclass(frozen=True)
class Family:
    """Metrics of one name. Those of `counts` only rise."""

    name: str
    help: str
    counts: bool = True
    labels: tuple[str, ...] = ()


DONE = Family("splitc_requests_done_total", "Requests that were answered")
FAILED = Family("splitc_requests_failed_total", "Requests that failed")
CAPTURED = Family("splitc_requests_captured_total", "Requests for which a CUDA graph was captured")
REPLAYED = Family("splitc_requests_replayed_total", "Requests that were replayed as CUDA graphs")
IN_FLIGHT = Family("splitc_requests_in_flight", "Requests in flight", counts=False)
BUSY = Family("splitc_rank_busy_seconds_total", "Seconds that a rank's engines ran", labels=("rank", "device"))
FAMILIES = (DONE, FAILED, CAPTURED, REPLAYED, IN_FLIGHT, BUSY)

# Adds to a metric, or sets one that does not count.
Put = Callable[[float], None]


class MetricsPage:
    """Puts counters on a server's page. `find` gives what changes the server's metric of a family with some labels."""

    def __init__(self, find: Callable[[Family, Mapping[str, str]], Put]) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._shown: dict[tuple[str, ...], float] = {}
        self._puts: dict[tuple[str, ...], Put] = {}

    def show(self, metrics: Metrics, devices: Sequence[Device]) -> None:
        """Update the page to these counters, which are later than the previous ones."""
        with self._lock:
            for family, labels, value in _readings(metrics, devices):
                self._show(family, labels, value)

    def _show(self, family: Family, labels: Mapping[str, str], value: float) -> None:
        key = (family.name, *labels.values())
        if key not in self._puts:
            self._puts[key] = self._find(family, labels)
        more = value - self._shown.get(key, 0.0)
        if not family.counts:
            self._puts[key](value)
        elif more > 0:
            self._puts[key](more)
        else:
            return  # another thread was faster, with later counters
        self._shown[key] = value


def _readings(metrics: Metrics, devices: Sequence[Device]) -> Iterator[tuple[Family, Mapping[str, str], float]]:
    yield DONE, {}, metrics.done
    yield FAILED, {}, metrics.failed
    yield CAPTURED, {}, metrics.captured
    yield REPLAYED, {}, metrics.replayed
    yield IN_FLIGHT, {}, metrics.in_flight
    for rank, (device, seconds) in enumerate(zip(devices, metrics.busy, strict=True)):
        yield BUSY, {"rank": str(rank), "device": str(device)}, seconds


@cache
def find_metric(family: Family) -> Any:
    """MLServer's metrics of one name, for all models of this process. mlserver.register only makes histograms."""
    from prometheus_client import Counter, Gauge  # which other servers lack

    names = ("model", *family.labels)
    if family.counts:
        return Counter(family.name, family.help, names)
    return Gauge(family.name, family.help, names, multiprocess_mode="livesum")
