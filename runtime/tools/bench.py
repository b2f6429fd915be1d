"""Measure a package's times, alternating with those of the unsplit model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from splitc.runtime.engines.onnxruntime_cpu import OnnxRuntimeBackend
from splitc.runtime.feeds.checks import Inputs
from splitc.runtime.package.manifest import Source
from splitc.runtime.package.steps import Receive, Reduce, Run
from splitc.runtime.ranks.loop import Replay
from splitc.runtime.ranks.request import NEVER, Execution, InFlightRequest
from splitc.runtime.session.session import Session
from splitc.runtime.threads.futures import in_order
from splitc.runtime.threads.progress import counted
from splitc.runtime.tools.unsplit import all_feeds, load_unsplit, need_inputs
from splitc.runtime.units import format_seconds


@dataclass(frozen=True)
class Latency:
    """Median and 90th percentile of the seconds per run, over all runs."""

    median: float
    p90: float
    runs: int

    def said(self) -> tuple[str, str]:
        """Both as text."""
        return format_seconds(self.median), format_seconds(self.p90)


@dataclass(frozen=True)
class RankTimes:
    """Median seconds of a rank per run: `busy` in engines, `waiting` for other ranks or summing with them, `overhead`.

    If requests are replayed as CUDA graphs, `busy` is all of the GPUs' time. `overhead` is the runtime's own: passing
    and binding values, cutting and joining shards. `utilization` is the share of the whole time that its engines ran.
    """

    device: str
    busy: float
    waiting: float
    overhead: float
    utilization: float

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Busy, waiting and overhead."""
        return self.busy, self.waiting, self.overhead


@dataclass(frozen=True)
class Baseline:
    """The unsplit model with a number of threads, one request at a time.

    `ratio` is the median over neighbouring runs of the package's time per request divided by the unsplit model's.
    """

    threads: int
    latency: Latency
    ratio: float


@dataclass(frozen=True)
class BenchResult:
    """A package's times, with `threads` on each rank, and those of the unsplit model if it ran too.

    `latency` is from a request's submission to its outputs, shards joined; `rate` is requests per second. `against_one`
    is the rate with several requests in flight divided by the rate with one at a time, as the median of neighbouring
    runs. `seconds` has the latency of each request. `timeline` has the last requests, and `alone` the last one that ran
    with no other. `model` is what the package was made from.
    """

    latency: Latency
    rate: float
    in_flight: int
    against_one: float
    threads: int
    ranks: list[RankTimes]
    baselines: list[Baseline]
    seconds: list[float]
    timeline: list[dict[int, Execution]]
    alone: dict[int, Execution]
    model: Source

    def request_rows(self) -> tuple[Sequence[str], list[Sequence[str]]]:
        """For tables: the names of numbers, and a row each for the package and the unsplit model."""
        ratio = ["package / unsplit"] * bool(self.baselines)
        threads = f"{len(self.ranks)} x {self.threads}"
        package = ["package", threads, *self.latency.said(), f"{self.rate:.1f}/s", *("" for _ in ratio)]
        others = [
            ["unsplit", f"{n.threads}", *n.latency.said(), f"{1 / n.latency.median:.1f}/s", f"{n.ratio:.3f}"]
            for n in self.baselines
        ]
        return ("latency", "90 %", "rate", *ratio), [package, *others]

    def rank_rows(self) -> tuple[Sequence[str], list[Sequence[str]]]:
        """For tables: the names of numbers, and a row for each rank."""
        rows: list[Sequence[str]] = [
            [f"{number} {rank.device}", *map(format_seconds, rank.seconds), f"{rank.utilization:.0%}"]
            for number, rank in enumerate(self.ranks)
        ]
        return ("busy", "waiting", "overhead", "at work"), rows


# Requests in a round, for each request in flight. Package and unsplit model take turns by rounds. A choice: with fewer
# a round is mostly the start and the end of the stream, with more the machine's speed may change between turns.
ROUND = 8
# The number of last rounds whose timeline is kept. A choice: what a page and --trace can show.
TRACED = 8


def bench(
    session: Session,
    feeds: Mapping[str, npt.NDArray[Any]],
    *,
    in_flight: int = 1,
    baseline: Path | None = None,
    baseline_threads: Sequence[int] = (),
    runs: int = 50,
    warmup: int = 5,
    trusts_data: bool = False,
) -> BenchResult:
    """Time `runs` runs, `in_flight` at a time, in turns with one at a time and with the unsplit model.

    Taking turns, all of them see the same load of the machine. The unsplit model runs with the threads of all ranks
    together, and with those of one rank, since in layer mode one rank works at a time on a single request. With
    `trusts_data`, its data may lie outside its folder.
    """
    threads = baseline_threads or sorted({session.threads * len(session.devices), session.threads}, reverse=True)
    whole = all_feeds(session.manifest, feeds)
    others = {count: _baseline(baseline, count, whole, trusts_data) for count in threads} if baseline else {}
    rounds = max(1, runs // (1 if in_flight == 1 else ROUND * in_flight))
    counts = [runs // rounds + (number < runs % rounds) for number in range(rounds)]
    _stream(session, feeds, max(1, warmup), in_flight)
    for run in others.values():
        _repeat(run, max(1, warmup))
    streams = []
    single: list[_Stream] = []
    times: dict[int, list[float]] = {number: [] for number in others}
    for count in counted("timing", counts):
        streams.append(_stream(session, feeds, count, in_flight))
        single.append(streams[-1] if in_flight == 1 else _stream(session, feeds, count, 1))
        for number, run in others.items():
            times[number].append(_repeat(run, count))
    own = np.array([stream.seconds for stream in streams])
    latencies = [latency for stream in streams for latency in stream.latencies]
    return BenchResult(
        _latency(latencies),
        runs / float(own.sum()),
        in_flight,
        float(np.median(np.array([stream.seconds for stream in single]) / own)),
        session.threads,
        [_rank_times(str(device), number, streams) for number, device in enumerate(session.devices)],
        [
            Baseline(n, _latency(list(np.array(took) / counts)), float(np.median(own / took)))
            for n, took in times.items()
        ],
        latencies,
        [served for stream in streams[-TRACED:] for served in stream.timeline],
        single[-1].timeline[-1],
        session.manifest.source,
    )


@dataclass(frozen=True)
class _Stream:
    """A run of requests: its total seconds, the seconds of each request, and the times of the ranks' steps."""

    seconds: float
    latencies: list[float]
    timeline: list[dict[int, Execution]]


def _stream(session: Session, feeds: Mapping[str, npt.NDArray[Any]], count: int, in_flight: int) -> _Stream:
    """Run the feeds `count` times, with at most `in_flight` at a time."""
    arrays = Inputs(session.inputs, fixed=session.manifest.fixed).on_host(feeds)
    held = session.adapters.sum(None)
    latencies, timeline = [], []
    first = time.perf_counter()
    alone = in_flight == 1
    for request in in_order(
        (session.submit_request(InFlightRequest(arrays, adapters=held), here=alone) for _ in range(count)), in_flight
    ):
        done, joining = max(served.end for served in request.executions.values()), time.perf_counter()
        session.join(request)
        latencies.append(done - request.submitted + time.perf_counter() - joining)
        timeline.append(request.executions)
    return _Stream(time.perf_counter() - first, latencies, timeline)


def _repeat(run: Callable[[], None], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        run()
    return time.perf_counter() - start


def _baseline(path: Path, threads: int, feeds: Mapping[str, npt.NDArray[Any]], trusts_data: bool) -> Callable[[], None]:
    """The unsplit model at its fastest: with IO binding, and inputs uploaded once."""
    backend = OnnxRuntimeBackend(threads, trusts_data)
    engine = load_unsplit(backend, path, trusts_data)
    need_inputs(path, engine.inputs, feeds)
    values = {name: backend.upload(feeds[name]) for name in engine.inputs}

    def run() -> None:
        engine.run(values, {})

    return run


def _rank_times(device: str, number: int, streams: Sequence[_Stream]) -> RankTimes:
    # Where groups of ranks divide rows, a request of few rows is not for all of them.
    runs = [request.get(number, NEVER) for stream in streams for request in stream.timeline]
    runs = [run for run in runs if run is not NEVER] or [NEVER]

    def seconds(*kinds: type) -> list[float]:
        return [sum(s.end - s.start for s in run.spans if isinstance(s.step, kinds)) for run in runs]

    busy, waiting = np.array(seconds(Run, Replay)), np.array(seconds(Receive, Reduce))
    overhead = np.array([run.end - run.start for run in runs]) - busy - waiting
    whole = sum(stream.seconds for stream in streams)
    typical = [float(np.median(times)) for times in (busy, waiting, overhead)]
    return RankTimes(device, typical[0], typical[1], typical[2], float(busy.sum()) / whole)


def _latency(seconds: list[float]) -> Latency:
    return Latency(float(np.median(seconds)), float(np.percentile(seconds, 90)), len(seconds))
