"""Requests as spans of OpenTelemetry, in programs that use it.

splitc does not import it: a program that traces has imported it before its first request.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from splitc.runtime.hardware.devices import Device
from splitc.runtime.log import LOG
from splitc.runtime.ranks.request import InFlightRequest
from splitc.runtime.requests.metrics import is_replayed

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
