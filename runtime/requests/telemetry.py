"""Reports a session's requests: counters, the log, and spans of OpenTelemetry in programs that use it.

splitc does not import that: a program that traces has imported it before its first request.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import Any

from splitc.runtime.hardware.devices import Device
from splitc.runtime.log import LOG
from splitc.runtime.ranks.request import InFlightRequest
from splitc.runtime.requests.metrics import Counters, is_replayed
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


MODULE = "opentelemetry.trace"


def begin_trace(request: InFlightRequest, package: str) -> Any:
    """The span of a request, as a child of the current one; None if the program does not trace."""
    if (otel := sys.modules.get(MODULE)) is None:
        return None
    try:
        started = _nanoseconds(request.submitted)
        span = otel.get_tracer("splitc").start_span(
            "splitc request", start_time=started, attributes={"splitc.package": package}
        )
        return span if span.is_recording() else None
    except Exception:  # of whatever the program has put there: the request runs all the same
        LOG.exception("a request can't be traced")
        return None


def end_trace(span: Any, request: InFlightRequest, devices: Sequence[Device], error: BaseException | None) -> None:
    """End the span of a request, with a child span for each rank that ran it."""
    otel = sys.modules[MODULE]
    try:
        inside = otel.set_span_in_context(span)
        span.set_attribute("splitc.replayed", is_replayed(request))
        for rank, ran in sorted(request.executions.items()):
            if ran.end:
                part = otel.get_tracer("splitc").start_span(
                    f"splitc rank {rank}",
                    context=inside,
                    start_time=_nanoseconds(ran.start),
                    attributes={"splitc.device": str(devices[rank])},
                )
                part.end(_nanoseconds(ran.end))
        if error is not None:
            span.record_exception(error)
            span.set_status(otel.StatusCode.ERROR, str(error))
        span.end()
    except Exception:
        LOG.exception("a request can't be traced")


def _nanoseconds(seconds: float) -> int:
    """A time of time.perf_counter as nanoseconds since 1970."""
    return time.time_ns() - time.perf_counter_ns() + int(seconds * 1e9)
