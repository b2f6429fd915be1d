"""What a plan will take: a request's time from end to end, and the time between requests that stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from splitc.compiler.analysis.costs import NOMINAL, Speed
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.planning.plan import Plan, RankPlan
from splitc.runtime.devices import Device, cache_bytes, cores, threads_for
from splitc.runtime.machine import Machine

# Seconds to start an engine, beside what it computes (on GPUs as part of a CUDA graph); to feed it an array or give
# one; and to cut or join one of which ranks have parts.
START, ARRAY, PART = {"cpu": 4e-5, "cuda": 2e-6}, 5e-6, 1e-5
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


def predict(plan: Plan, machine: Machine, threads: int | None, measured: float = 1.0) -> Prediction:
    """Predict a plan's times on a machine's links, for a request whose states are on its devices already, as those of a
    sequence are. `threads` are those of each CPU device; None divides the cores.

    Nodes take what the roofline model says, times `measured`, which is what a profile found the blocks to take over
    what is estimated for them. Where a plan was profiled and its ranks hold whole blocks, their own times are taken.
    """
    return _Predictor(plan, machine, threads, measured).predict()


class _Predictor:
    def __init__(self, plan: Plan, machine: Machine, threads: int | None, measured: float) -> None:
        self._plan = plan
        self._machine = machine
        self._devices = [rank.device for rank in plan.ranks]
        self._threads = threads_for(self._devices, threads)
        self._measured = measured

    def predict(self) -> Prediction:
        if self._plan.rows is not None:
            latency = self._row_latency()
            return Prediction(latency, latency)  # the main rank waits for the others
        groups = sorted({rank.group for rank in self._plan.ranks})
        members = [[rank for rank in self._plan.ranks if rank.group == group] for group in groups]
        alone = [self._group_seconds(each, len(each)) for each in members]
        together = [self._group_seconds(each, len(self._plan.ranks)) for each in members]
        crossing = [
            self._machine.copy(before[0].device, after[0].device).seconds(cut.bytes) + self._cold(before)
            for before, after, cut in zip(members, members[1:], self._plan.cuts)
        ]
        slowest = max(map(sum, zip(together, [0.0, *crossing])))
        # More ranks than cores take turns: the cores are then always at work.
        every = sum(seconds * min(1.0, self._crowd(len(each))) for seconds, each in zip(together, members))
        return Prediction(sum(alone) + sum(crossing), max(slowest, every))

    def _crowd(self, ranks: int) -> float:
        """The share of all cores that so many ranks want; GPUs want none."""
        on_cpu = all(device.kind == "cpu" for device in self._devices)
        return ranks * self._threads / cores() if on_cpu else 0.0

    def _group_seconds(self, ranks: Sequence[RankPlan], at_once: int) -> float:
        """The time of a stage, while so many ranks are at work: that of its slowest rank, and of what they sum."""
        slowest = max(self._rank_seconds(rank, at_once) for rank in ranks) * max(1.0, self._crowd(len(ranks)))
        slowest += ARRAY * self._arrays(ranks[0])
        if len(ranks) == 1:
            return slowest + self._start(ranks)
        tensor = self._plan.tensor
        assert tensor is not None
        link = self._machine.sum(ranks[0].device, ranks[1].device)
        stages = max(rank.group for rank in self._plan.ranks) + 1
        size = sum(map(self._plan.analysis.costs.value_bytes, tensor.choice.sums.summed)) / stages
        count = tensor.choice.sums.count / stages
        sums = (len(ranks) - 1) * (count * link.latency + size * link.per_byte)
        return slowest * (1 + JITTER) + sums + (count + 1) * self._start(ranks) + self._parts_seconds() / stages

    def _parts_seconds(self) -> float:
        """The time to cut what is fed, and to join what is given, where ranks have parts of it."""
        tensor, graph = self._plan.tensor, self._plan.analysis.graph
        assert tensor is not None
        ends = (*graph.graph.inputs, *graph.graph.outputs)
        parts = [v for v in ends if v.name not in self._states and tensor.shards(0).splits(tensor.axes(v))]
        size = sum(map(self._plan.analysis.costs.value_bytes, parts))
        return len(parts) * PART + 2 * size / rank_speed(self._devices[0], self._threads, 1).bytes

    def _rank_seconds(self, rank: RankPlan, at_once: int) -> float:
        if self._plan.profiled and self._plan.tensor is None:
            return rank.seconds
        return self._seconds(rank, rank.stage.nodes, at_once)

    def _seconds(self, rank: RankPlan, nodes: Iterable[ir.Node], at_once: int) -> float:
        """The time that the rank takes for its part of the nodes."""
        speed = self._speed(rank, self._threads, at_once)
        one = self._speed(rank, 1, at_once)
        costs = self._plan.analysis.costs
        total = 0.0
        for node in nodes:
            if node in costs.graph.folded or not (share := self._share(rank, node)):
                continue
            least = KERNEL[rank.device.kind] if not operator_of(node).view else 0.0
            alone = share * costs.seconds(node, one)
            total += max(least, alone if alone < SMALL else share * costs.seconds(node, speed))
        return self._measured * total

    def _speed(self, rank: RankPlan, threads: int, at_once: int) -> Speed:
        return rank_speed(rank.device, threads, at_once, self._is_cached)

    @cached_property
    def _is_cached(self) -> bool:
        """Whether the processor's cache holds all that the ranks do, so that they don't wait for its memory."""
        return sum(rank.memory.total for rank in self._plan.ranks) < cache_bytes()

    def _share(self, rank: RankPlan, node: ir.Node) -> float:
        """The share of a node's work that the rank has."""
        if self._plan.rows is not None:
            product = self._plan.rows.products.get(node.outputs[0].name or "")
            return 1.0 if product is None else self._plan.rows.share(rank.part, product)
        if self._plan.tensor is None:
            return 1.0
        operation = self._plan.tensor.axis_map.operations[node]
        shards = self._plan.tensor.shards(rank.part)
        return shards.share(operation.outputs[0]) * shards.share((operation.contracted,))

    def _row_latency(self) -> float:
        """The main rank's own work, and in each round the slowest product and what is sent there and back."""
        split, ranks = self._plan.rows, self._plan.ranks
        assert split is not None
        main, *others = ranks
        own = [node for node in main.stage.nodes if node.outputs[0].name not in split.products]
        total = self._seconds(main, own, 1) + ARRAY * self._arrays(main)
        link = self._machine.copy(main.device, others[0].device)
        for products in split.rounds:
            nodes = [product.node for product in products]
            slowest = max(self._seconds(rank, nodes, len(ranks)) for rank in ranks)
            total += slowest * (1 + JITTER) * max(1.0, self._crowd(len(ranks)))
            total += 2 * (link.latency + self._cold(ranks) + self._start(ranks))
        # What comes back is copied once more, to where it is put together.
        joined = sum(map(self._plan.analysis.costs.value_bytes, (each.result for each in split.products.values())))
        speed = rank_speed(main.device, self._threads, 1)
        return total + sum(cut.bytes for cut in self._plan.cuts) * link.per_byte + 2 * joined / speed.bytes

    def _start(self, ranks: Sequence[RankPlan]) -> float:
        return START[ranks[0].device.kind]

    def _cold(self, ranks: Sequence[RankPlan]) -> float:
        return COLD[ranks[0].device.kind]

    def _arrays(self, rank: RankPlan) -> int:
        """How many arrays the rank is fed and gives."""
        return sum(value.name not in self._states for value in (*rank.stage.feeds, *rank.stage.outputs))

    @cached_property
    def _states(self) -> set[str]:
        """What is neither fed nor given, but stays on the devices from one request of a sequence to the next."""
        return {name for state in self._plan.analysis.states for name in (state.input, state.output)}


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
