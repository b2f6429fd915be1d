"""Time a package, beside the unsplit model, in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np
import numpy.typing as npt

from splitc.runtime.engines.onnxruntime import OnnxRuntimeBackend
from splitc.runtime.program import Receive, Reduce, Run, Span
from splitc.runtime.session import Session


@dataclass(frozen=True)
class Latency:
    """Seconds a run, over all runs."""

    median: float
    p90: float
    runs: int


@dataclass(frozen=True)
class RankTimes:
    """Median seconds a run that a rank's engines were busy, and that it waited for other ranks or summed with them."""

    device: str
    busy: float
    waiting: float


@dataclass(frozen=True)
class Baseline:
    """The unsplit model with a number of threads.

    `ratio` is the median, over neighbouring runs, of the package's time over the unsplit model's.
    """

    threads: int
    latency: Latency
    ratio: float


@dataclass(frozen=True)
class BenchResult:
    """A package's times, with `threads` on each rank, and those of the unsplit model if it ran too."""

    package: Latency
    threads: int
    ranks: list[RankTimes]
    baselines: list[Baseline]


def bench(
    session: Session,
    feeds: Mapping[str, npt.NDArray[Any]],
    *,
    baseline: Optional[Path] = None,
    baseline_threads: Sequence[int] = (),
    runs: int = 50,
    warmup: int = 5,
) -> BenchResult:
    """Time `runs` runs. With a baseline, package and unsplit model take turns, so that both see the same machine.

    The unsplit model runs with as many threads as all ranks have together, and with as many as one rank has: while one
    request passes through a layer split, one rank works at a time.
    """
    threads = baseline_threads or sorted({session.threads * len(session.manifest.ranks), session.threads}, reverse=True)
    others = {count: _baseline(baseline, count, feeds) for count in threads} if baseline else {}
    spans: list[dict[int, list[Span]]] = []
    own: list[float] = []
    times: dict[int, list[float]] = {count: [] for count in others}
    for number in range(-warmup, runs):
        start = time.perf_counter()
        _, request_spans = session.run_timed(feeds)
        took = time.perf_counter() - start
        others_took = {count: _time(run) for count, run in others.items()}
        if number >= 0:
            own.append(took)
            spans.append(request_spans)
            for count, other in others_took.items():
                times[count].append(other)
    return BenchResult(
        _latency(own),
        session.threads,
        [_rank_times(rank.device, [each[n] for each in spans]) for n, rank in enumerate(session.manifest.ranks)],
        [Baseline(n, _latency(took), float(np.median(np.array(own) / np.array(took)))) for n, took in times.items()],
    )


def _time(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


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

    return RankTimes(device, seconds(Run), seconds(Receive) + seconds(Reduce))


def _latency(seconds: list[float]) -> Latency:
    return Latency(float(np.median(seconds)), float(np.percentile(seconds, 90)), len(seconds))
