"""Reports a session's requests: counters, the log, and traces."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import CancelledError

from splitc.runtime.hardware.devices import Device
from splitc.runtime.log import LOG
from splitc.runtime.ranks.request import InFlightRequest
from splitc.runtime.requests.metrics import Counters
from splitc.runtime.requests.traces import begin_trace, end_trace
from splitc.runtime.units import first_few, format_seconds, format_shape


class Telemetry:
    """Records each request of a session of a package on these devices."""

    def __init__(self, package: str, devices: Sequence[Device]) -> None:
        self._package, self._devices = package, devices
        self.counters = Counters(len(devices))

    def begin(self, request: InFlightRequest) -> None:
        """Record that the request has got a place, on the thread that submitted it."""
        self.counters.begin()
        request.trace = begin_trace(request, self._package)

    def end(self, request: InFlightRequest, error: BaseException | None) -> None:
        """Record that all ranks have finished the request, or that it has failed."""
        cancelled = isinstance(error, CancelledError)
        captured = self.counters.end(request, done=error is None, failed=error is not None and not cancelled)
        if request.trace is not None:
            end_trace(request.trace, request, self._devices, error)
        if cancelled:
            LOG.info("%s: a request was cancelled", self._package)
        elif error is not None:
            LOG.warning("%s: a request failed: %s", self._package, error)
        elif captured:
            shapes = ", ".join(f"{name} {format_shape(feed.shape)}" for name, feed in request.feeds.items())
            LOG.info("%s: captured as a CUDA graph: %s", self._package, shapes)

    def loaded(self, seconds: float) -> None:
        """Record that the ranks have loaded their engines."""
        devices = first_few([str(device) for device in self._devices])
        LOG.info("%s: loaded on %s, in %s", self._package, devices, format_seconds(seconds))

    def broken(self, error: BaseException) -> None:
        """Record that the session can run no more requests."""
        LOG.error("%s: the session is broken: %s", self._package, error)
