"""Metrics of MLServer's page. A process has one metric of each name."""

from __future__ import annotations

from functools import cache

from prometheus_client import Counter, Gauge

from splitc.runtime.serving.metrics_page import Family


@cache
def find_metric(family: Family) -> Counter | Gauge:
    """The metrics of one name, for all models of this process. mlserver.register only makes histograms."""
    names = ("model", *family.labels)
    if family.counts:
        return Counter(family.name, family.help, names)
    return Gauge(family.name, family.help, names, multiprocess_mode="livesum")
