"""What work takes: a rank's nodes, a hand-over, a sum. From these the modes predict a plan's times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from splitc.compiler.analysis.costs import Speed, nominal_speed
from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.analysis.memory import state_names
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.planning.rank_plan import RankPlan
from splitc.runtime.device_profiles import HOST, Link, find_profile
from splitc.runtime.devices import Device, cache_bytes, cores
from splitc.runtime.machine import Machine


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
        speed, one = (
            rank_speed(rank.device, threads, at_once, self.machine, self._is_cached) for threads in (self.threads, 1)
        )
        costs = self.analysis.costs
        total = 0.0
        for node in nodes:
            if node in costs.graph.folded or not (own := share(node)):
                continue
            least = find_profile(rank.device.kind).kernel if not operator_of(node).view else 0.0
            alone = own * costs.seconds(node, one)
            total += max(least, alone if alone < HOST.single_thread else own * costs.seconds(node, speed))
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
        return find_profile(rank.device.kind).engine_start

    def feeding(self, rank: RankPlan) -> float:
        """The time to feed a rank its arrays and to take what it gives; states stay where they are."""
        ends = (*rank.stage.feeds, *rank.stage.outputs)
        return HOST.array * sum(value.name not in self.states for value in ends)

    @cached_property
    def states(self) -> frozenset[str]:
        """What is neither fed nor given, but stays on the devices from one request of a sequence to the next."""
        return state_names(self.analysis.states)

    def cold(self, rank: RankPlan) -> float:
        """What a hand-over from a rank takes beyond its link's measured time."""
        return find_profile(rank.device.kind).cold_link

    def copy(self, one: RankPlan, other: RankPlan) -> Link:
        """The link between two ranks."""
        return self.machine.copy(one.device, other.device)

    def sum(self, one: RankPlan, other: RankPlan) -> Link:
        """A sum over two ranks."""
        return self.machine.sum(one.device, other.device)

    def meeting(self, seconds: float) -> float:
        """The time between two meetings of ranks that each take so many seconds: the slowest is waited for."""
        return seconds * (1 + HOST.jitter)

    def copying(self, rank: RankPlan, size: int) -> float:
        """The time to copy so many bytes within a rank's memory."""
        return 2 * size / rank_speed(rank.device, self.threads, 1, self.machine).bytes


def rank_speed(device: Device, threads: int, at_once: int, machine: Machine, cached: bool = False) -> Speed:
    """The speed of one of so many ranks that work at once, as it was measured on the machine, or as the profile has it.

    CPU devices share the cores, and their memory, unless what they read is in the cache.
    """
    one = _unshared_speed(device, machine)
    if device.kind != "cpu":
        return one
    threads = min(threads, cores())
    at_once = min(at_once, cores() // threads)
    computing = _gain(HOST.thread_gain, threads)
    if cached:
        return Speed(one.flops * computing, one.bytes * computing)
    crowded = HOST.crowded if at_once > 1 else 1.0
    reading = _gain(HOST.bandwidth_gain, threads * at_once) / at_once
    return Speed(one.flops * computing * crowded, one.bytes * reading)


def _gain(share: float, count: int) -> float:
    """How many times faster so many threads are than one, each but the first of which gains this share."""
    return 1 + share * (count - 1)


def _unshared_speed(device: Device, machine: Machine) -> Speed:
    """The speed of a GPU, or of one core. What is measured of a CPU is that of all cores."""
    nominal, measured = nominal_speed(device.kind), machine.speed(device)
    count = cores() if device.kind == "cpu" else 1
    flops = measured.flops / _gain(HOST.thread_gain, count) if measured.flops else nominal.flops
    return Speed(flops, measured.bytes / _gain(HOST.bandwidth_gain, count) if measured.bytes else nominal.bytes)
