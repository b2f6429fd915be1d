"""Time a package, beside the unsplit model, in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np
import numpy.typing as npt

from splitc.runtime.engines.onnxruntime import OnnxRuntimeBackend
from splitc.runtime.program import Receive, Run, Span
from splitc.runtime.session import Session


@dataclass(frozen=True)
class Latency:
    """Seconds a run, over all runs."""

    median: float
    p90: float
    runs: int


@dataclass(frozen=True)
class RankTimes:
    """Median seconds a run that a rank's engines were busy, and that it waited for other ranks."""

    device: str
    busy: float
    waiting: float


@dataclass(frozen=True)
class BenchResult:
    """`ratio` is the median over pairs of neighbouring runs of the package's time over the unsplit model's."""

    package: Latency
    ranks: list[RankTimes]
    threads: int
    baseline: Optional[Latency] = None
    baseline_threads: Optional[int] = None
    ratio: Optional[float] = None


def bench(
    session: Session,
    feeds: Mapping[str, npt.NDArray[Any]],
    *,
    baseline: Optional[Path] = None,
    baseline_threads: Optional[int] = None,
    runs: int = 50,
    warmup: int = 5,
) -> BenchResult:
    """Time `runs` runs. With a baseline, package and unsplit model take turns, so that both see the same machine.

    The unsplit model gets as many threads as all ranks together, unless `baseline_threads` says otherwise.
    """
    threads = baseline_threads or session.threads * len(session.manifest.ranks)
    run_baseline = _baseline(baseline, threads, feeds) if baseline else None
    spans: list[dict[int, list[Span]]] = []
    own, other = [], []
    for number in range(-warmup, runs):
        start = time.perf_counter()
        _, request_spans = session.run_timed(feeds)
        middle = time.perf_counter()
        if run_baseline:
            run_baseline()
        end = time.perf_counter()
        if number >= 0:
            own.append(middle - start)
            other.append(end - middle)
            spans.append(request_spans)
    ranks = [
        _rank_times(rank.device, [each[number] for each in spans]) for number, rank in enumerate(session.manifest.ranks)
    ]
    if not run_baseline:
        return BenchResult(_latency(own), ranks, session.threads)
    ratio = float(np.median(np.array(own) / np.array(other)))
    return BenchResult(_latency(own), ranks, session.threads, _latency(other), threads, ratio)


def _baseline(path: Path, threads: int, feeds: Mapping[str, npt.NDArray[Any]]) -> Callable[[], None]:
    """The unsplit model as a good user would run it: IO binding, inputs bound once."""
    backend = OnnxRuntimeBackend(threads)
    engine = backend.load(path)
    values = {name: backend.upload(feeds[name]) for name in engine.inputs}

    def run() -> None:
        engine.run(values)

    return run


def _rank_times(device: str, runs: list[list[Span]]) -> RankTimes:
    def seconds(kind: type) -> float:
        return float(np.median([sum(s.end - s.start for s in spans if isinstance(s.step, kind)) for spans in runs]))

    return RankTimes(device, seconds(Run), seconds(Receive))


def _latency(seconds: list[float]) -> Latency:
    return Latency(float(np.median(seconds)), float(np.percentile(seconds, 90)), len(seconds))
