"""Advice from a bench's own numbers: what to change, and the expected gain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from splitc.runtime.package.manifest import Manifest
from splitc.runtime.package.mode_words import words_of
from splitc.runtime.tools.bench import BenchResult
from splitc.runtime.tools.earlier_bench import EarlierBench
from splitc.runtime.units import format_seconds

# What is worth saying: a gain of less is within what times vary by.
WORTH = 0.05
# A rank that is at work for this share of the time leaves nothing to gain by more requests in flight.
BUSY = 0.9
# Requests vary much if the slowest tenth takes so many times the median.
UNSTEADY = 1.3


def bench_verdict(manifest: Manifest, result: BenchResult, before: EarlierBench | None) -> list[str]:
    """Sentences, the most important first."""
    is_pipeline = bool(manifest.cuts) and not words_of(manifest.split_mode).is_radial and not manifest.replicas
    says = [*_beside_unsplit(result), *_beside_before(result, before)]
    says += _in_stages(result) if is_pipeline else _together(result)
    return [*says, *_unsteady(result)]


def _beside_unsplit(result: BenchResult) -> Iterator[str]:
    if not result.baselines:
        return
    best = min(result.baselines, key=lambda baseline: baseline.latency.median)
    slower, rate = result.latency.median / best.latency.median, result.rate * best.latency.median
    threads = "one thread" if best.threads == 1 else f"{best.threads} threads"
    if result.in_flight == 1:
        yield f"A request takes {slower:.2f} times as long as with the unsplit model on {threads}."
    else:
        yield (
            f"{rate:.2f} times the rate of the unsplit model on {threads}, one request at a time; a "
            f"request takes {slower:.2f} times as long, with {result.in_flight} in flight."
        )


def _beside_before(result: BenchResult, before: EarlierBench | None) -> Iterator[str]:
    if before is None:
        return
    rate, latency = result.rate / before.rate, result.latency.median / before.latency.median
    if max(abs(rate - 1), abs(latency - 1)) < WORTH:
        yield f"As fast as in {before.name}, within {WORTH:.0%}."
    else:
        yield f"Beside {before.name}: {rate:.2f} times the rate, {latency:.2f} times the latency."


def _in_stages(result: BenchResult) -> Iterator[str]:
    """Stages work on different requests at the same time: the slowest one sets the pace."""
    busy = [rank.busy for rank in result.ranks]
    slowest, mean = max(busy), sum(busy) / len(busy)
    if not mean:
        return
    number = busy.index(slowest)
    device, at_work = result.ranks[number].device, result.ranks[number].utilization
    if at_work < BUSY and slowest * result.rate < 1 / (1 + WORTH):
        most = 1 / (slowest * result.rate) - 1
        yield (
            f"Rank {number} ({device}) is the busiest, and at work {at_work:.0%} of the time: with more requests in "
            f"flight than {result.in_flight} (--in-flight) it would serve up to {1 / slowest:.1f} a second, "
            f"{most:.0%} more."
        )
    if slowest / mean - 1 >= WORTH:
        yield (
            f"Rank {number} ({device}) computes {format_seconds(slowest)} of a request, the mean of all ranks is "
            f"{format_seconds(mean)}: stages of equal time would give up to {slowest / mean - 1:.0%} more a second. "
            "Plan with --profile, which measures blocks, or move a block in plan.json."
        )
    else:
        yield f"Stages take equal times, to {slowest / mean - 1:.0%}: moving blocks gains nothing."


def _together(result: BenchResult) -> Iterator[str]:
    """All ranks work on one request: time that they wait for each other is lost."""
    if len(result.ranks) < 2:
        return
    busy, waiting = (_mean([getattr(rank, what) for rank in result.ranks]) for what in ("busy", "waiting"))
    whole = busy + waiting + _mean([rank.overhead for rank in result.ranks])
    if whole and waiting / whole >= WORTH:
        yield (
            f"Ranks wait for each other {waiting / whole:.0%} of a request: {format_seconds(waiting)} of "
            f"{format_seconds(whole)}, which fewer devices or larger requests would reduce."
        )
    if busy and max(rank.busy for rank in result.ranks) / busy - 1 >= WORTH:
        slowest = max(result.ranks, key=lambda rank: rank.busy)
        yield (
            f"{slowest.device} computes {format_seconds(slowest.busy)}, the mean of all ranks is "
            f"{format_seconds(busy)}: shares by speed (--tensor-split) would save up to "
            f"{format_seconds(slowest.busy - busy)} of a request."
        )
    overhead = whole - busy - waiting
    if whole and overhead / whole >= 2 * WORTH:
        yield f"{overhead / whole:.0%} of a request is the runtime's own work: larger requests have less of it."


def _unsteady(result: BenchResult) -> Iterator[str]:
    if result.latency.p90 > UNSTEADY * result.latency.median:
        yield (
            f"One request in ten takes {format_seconds(result.latency.p90)} or more, "
            f"{result.latency.p90 / result.latency.median:.1f} times the median: other programs may have had the cores."
        )


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
