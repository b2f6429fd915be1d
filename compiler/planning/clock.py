"""What work takes: a rank's nodes, a hand-over, a sum. From these the modes predict a plan's times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from splitc.compiler.analysis.costs import NOMINAL, Speed
from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.analysis.memory import state_names
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.planning.rank_plan import RankPlan
from splitc.runtime.device_profiles import Link
from splitc.runtime.devices import Device, cache_bytes, cores
from splitc.runtime.machine import Machine

# Seconds to start an engine, beside what it computes (on GPUs as part of a CUDA graph); to feed it an array or give
# one; and to cut or join one of which ranks have shards.
START, ARRAY, SHARD = {"cpu": 4e-5, "cuda": 2e-6}, 5e-6, 1e-5
# How much of another thread's work, or another core's bandwidth, is gained by using it for one operator: threads wait
# for each other, and the cores of a CPU share its memory.
THREAD_GAIN, BANDWIDTH_GAIN = 0.9, 0.15
# What takes fewer seconds is not spread over threads.
SMALL = 2e-5
# Seconds of a kernel that has next to nothing to do, on an H200; and what a hand-over between GPUs takes there beyond
# what the link was measured to take, when they have had other things to do meanwhile.
KERNEL, COLD = {"cpu": 0.0, "cuda": 2e-6}, {"cpu": 0.0, "cuda": 5e-6}
# CPU devices that work at once keep this share of their speed where they wait for memory. Where ranks meet again and
# again, the slower of them is waited for: so much of the time between two meetings.
CROWDED, JITTER = 0.9, 0.1


@dataclass(frozen=True)
class Prediction:
    """Seconds a request takes from its submission to its outputs, and seconds between the outputs of a stream."""

    latency: float
    interval: float


def all_of_it(node: ir.Node) -> float:
    """The share of a node's work that a rank has which runs it whole."""
    return 1.0


@dataclass(frozen=True)
class Clock:
    """The times of a plan's ranks on a machine, for a request whose states are on its devices already.

    `threads` are those of each CPU device. Nodes take what the roofline model says, times `measured`: what a profile
    found the blocks to take over what is estimated for them. Where a plan was `profiled` and its ranks hold whole
    blocks, their own times are taken.
    """

    analysis: Analysis
    ranks: Sequence[RankPlan]
    machine: Machine
    threads: int
    measured: float = 1.0
    profiled: bool = False

    def seconds(
        self, rank: RankPlan, nodes: Iterable[ir.Node], at_once: int, share: Callable[[ir.Node], float] = all_of_it
    ) -> float:
        """The time that a rank takes for its share of the nodes, while so many ranks are at work."""
        speed, one = (rank_speed(rank.device, threads, at_once, self._is_cached) for threads in (self.threads, 1))
        costs = self.analysis.costs
        total = 0.0
        for node in nodes:
            if node in costs.graph.folded or not (own := share(node)):
                continue
            least = KERNEL[rank.device.kind] if not operator_of(node).view else 0.0
            alone = own * costs.seconds(node, one)
            total += max(least, alone if alone < SMALL else own * costs.seconds(node, speed))
        return self.measured * total

    @cached_property
    def _is_cached(self) -> bool:
        """Whether the processor's cache holds all that the ranks do, so that they don't wait for its memory."""
        return sum(rank.memory.total for rank in self.ranks) < cache_bytes()

    def crowd(self, ranks: int) -> float:
        """The share of all cores that so many ranks want; GPUs want none."""
        on_cpu = all(rank.device.kind == "cpu" for rank in self.ranks)
        return ranks * self.threads / cores() if on_cpu else 0.0

    def start(self, rank: RankPlan) -> float:
        """The time to start an engine of a rank."""
        return START[rank.device.kind]

    def feeding(self, rank: RankPlan) -> float:
        """The time to feed a rank its arrays and to take what it gives; states stay where they are."""
        ends = (*rank.stage.feeds, *rank.stage.outputs)
        return ARRAY * sum(value.name not in self.states for value in ends)

    @cached_property
    def states(self) -> frozenset[str]:
        """What is neither fed nor given, but stays on the devices from one request of a sequence to the next."""
        return state_names(self.analysis.states)

    def cold(self, rank: RankPlan) -> float:
        """What a hand-over from a rank takes beyond its link's measured time."""
        return COLD[rank.device.kind]

    def copy(self, one: RankPlan, other: RankPlan) -> Link:
        """The link between two ranks."""
        return self.machine.copy(one.device, other.device)

    def sum(self, one: RankPlan, other: RankPlan) -> Link:
        """A sum over two ranks."""
        return self.machine.sum(one.device, other.device)

    def copying(self, rank: RankPlan, size: int) -> float:
        """The time to copy so many bytes within a rank's memory."""
        return 2 * size / rank_speed(rank.device, self.threads, 1).bytes


def rank_speed(device: Device, threads: int, at_once: int, cached: bool = False) -> Speed:
    """The speed of one of so many ranks that work at once.

    CPU devices share the cores, and their memory, unless what they read is in the cache.
    """
    one = NOMINAL[device.kind]
    if device.kind != "cpu":
        return one
    threads = min(threads, cores())
    at_once = min(at_once, cores() // threads)
    computing = 1 + THREAD_GAIN * (threads - 1)
    if cached:
        return Speed(one.flops * computing, one.bytes * computing)
    crowded = CROWDED if at_once > 1 else 1.0
    reading = (1 + BANDWIDTH_GAIN * (threads * at_once - 1)) / at_once
    return Speed(one.flops * computing * crowded, one.bytes * reading)
