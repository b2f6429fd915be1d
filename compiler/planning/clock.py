"""Times of a rank's nodes, of copies between ranks, and of sums. The modes predict a plan's times from these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import onnx_ir as ir

from splitc.compiler.analysis.costs import Costs, Speed, nominal_speed
from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.analysis.memory import state_names
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.planning.rank_plan import RankPlan
from splitc.compiler.planning.resources import Resources
from splitc.runtime.hardware.devices import Device, cache_bytes, cores, threads_for
from splitc.runtime.hardware.machine import Machine
from splitc.runtime.hardware.profiles import HOST, PROFILES, DeviceProfile, Link


@dataclass(frozen=True)
class Prediction:
    """Seconds from a request's submission to its outputs, and seconds between outputs in a stream of requests."""

    latency: float
    interval: float


def whole_node(node: ir.Node) -> float:
    """The share of a node's work for a rank that runs whole nodes: 1."""
    return 1.0


@dataclass(frozen=True)
class Pace:
    """A device's speed with all its threads, and with one; and the times of its kernels beside their work."""

    speed: Speed
    one: Speed
    profile: DeviceProfile

    def seconds(self, costs: Costs, nodes: Iterable[ir.Node], share: Callable[[ir.Node], float] = whole_node) -> float:
        """The seconds of a share of each node's work."""
        folded, profile = costs.graph.folded, self.profile
        total = 0.0
        for node in nodes:
            if node in folded or not (own := share(node)):
                continue
            operator = operator_of(node)
            least, launch = (0.0, 0.0) if operator.is_view else (profile.kernel, profile.launch)
            took = own * costs.seconds(node, self.one)
            if took > HOST.spreading and self.speed != self.one:  # otherwise more threads are no faster
                took = min(took, HOST.spreading + own * costs.seconds(node, self.speed))
            took = max(took, profile.step * costs.steps(node))
            total += launch + max(least, took) + (profile.attention_start if operator.is_attention else 0.0)
        return total


@dataclass(frozen=True)
class Clock:
    """The times of a plan's ranks on a machine, in seconds, for a request whose states are already on the devices.

    - `threads`: those of each CPU device.
    - `measured`: the ratio of the blocks' measured to their estimated time. A node's time is that of the roofline
      model, times this.
    - `profiled`: the ranks' measured times are used instead, if ranks hold whole blocks.
    - `operators`: engines contain splitc's operators for communication.
    - `replicas`: how many work at once, each like these ranks.
    - `fused`: nodes without work of their own in engines for GPUs.
    """

    analysis: Analysis
    ranks: Sequence[RankPlan]
    machine: Machine
    threads: int
    measured: float = 1.0
    profiled: bool = False
    operators: bool = False
    replicas: int = 1
    fused: frozenset[ir.Node] = frozenset()

    def seconds(
        self, rank: RankPlan, nodes: Iterable[ir.Node], at_once: int, share: Callable[[ir.Node], float] = whole_node
    ) -> float:
        """The time of a rank for its share of the nodes, while `at_once` ranks are working."""
        pace = find_pace(rank.device, self.threads, at_once * self.replicas, self.machine, self._is_cached)
        if rank.device.kind == "cuda":
            nodes = [node for node in nodes if node not in self.fused]
        return self.measured * pace.seconds(self.analysis.costs, nodes, share)

    @cached_property
    def _is_cached(self) -> bool:
        """Whether each host's cache holds all of its ranks' memory, so that they don't wait for main memory."""
        held: Counter[int | None] = Counter()
        for rank in self.ranks:
            held[rank.device.host] += rank.memory.total
        return max(held.values()) * self.replicas < cache_bytes()

    def crowd(self, ranks: Sequence[RankPlan]) -> float:
        """The share of their host's cores that these ranks use, on the fullest host; 0 for GPUs."""
        on_cpu = all(rank.device.kind == "cpu" for rank in self.ranks)
        most = max(Counter(rank.device.host for rank in ranks).values(), default=0)
        return most * self.replicas * self.threads / cores() if on_cpu else 0.0

    @property
    def held_up(self) -> float:
        """The share by which a stream's requests take longer than single ones.

        While devices compute, the caller feeds and reads other requests. If all cores are in use by threads, or by
        ranks, that wait for each other, the caller's work on one core delays all.
        """
        together = max(Counter((rank.replica, rank.group) for rank in self.ranks).values()) * self.threads
        return PROFILES["cpu"].jitter if together > 1 and self.crowd(self.ranks) >= 1 else 0.0

    def unlike(self, ranks: Sequence[RankPlan], sizes: Callable[[int], tuple[int, ...]]) -> list[RankPlan]:
        """One rank of each kind: ranks on equal devices take the same time if the `sizes` of their parts are equal."""
        kinds = {(rank.device.kind, self.machine.speed(rank.device), sizes(rank.part)): rank for rank in ranks}
        return list(kinds.values())

    def start(self, rank: RankPlan) -> float:
        """The time to start an engine of a rank."""
        return PROFILES[rank.device.kind].engine_start

    def feeding(self, rank: RankPlan) -> float:
        """The time to feed a rank its arrays and to fetch its outputs. States stay on the device.

        With a GPU, it includes the copies of a request from the host to the first stage, and of outputs to the host.
        """
        feeds, outputs = (
            [value for value in ends if value.name not in self.states]
            for ends in (rank.stage.feeds, rank.stage.outputs)
        )
        arrays = HOST.array * (len(feeds) + len(outputs))
        if rank.device.kind == "cpu":
            return arrays
        crossing = [feeds if rank.group == 0 else [], outputs]
        size = sum(self.analysis.costs.value_bytes(value) for values in crossing for value in values)
        return arrays + sum(map(bool, crossing)) * self._hop + size * self._host_link(rank).per_byte

    @property
    def _is_thread(self) -> bool:
        """Whether a GPU's rank is a thread of the caller's process, as the only rank is. Several are processes."""
        return len(self.ranks) * self.replicas == 1

    @property
    def _hop(self) -> float:
        """The time of a request's way to a GPU's rank, or back."""
        return HOST.thread_hop if self._is_thread else HOST.process_hop

    def _host_link(self, rank: RankPlan) -> Link:
        """The time of a copy between the host and a rank: a thread copies by itself, a process from shared memory."""
        if self._is_thread:
            return PROFILES[rank.device.kind].copy
        return self.machine.copy(Device("cpu", 0, host=rank.device.host), rank.device)

    @property
    def shares_cores(self) -> bool:
        """Whether some ranks are CPU devices, which slow each other down."""
        return any(rank.device.kind == "cpu" for rank in self.ranks)

    @cached_property
    def states(self) -> frozenset[str]:
        """The names of inputs and outputs that stay on the devices between requests of a sequence."""
        return state_names(self.analysis.states)

    def cold(self, rank: RankPlan) -> float:
        """The time of a copy from a rank beyond its link's measured time."""
        return PROFILES[rank.device.kind].cold_link

    def copy(self, one: RankPlan, other: RankPlan) -> Link:
        """The time of a copy between two ranks."""
        return self.machine.copy(one.device, other.device)

    def sums(self, members: Sequence[RankPlan], count: float, size: float) -> float:
        """The time of `count` sums over these ranks, of `size` bytes in total."""
        link = sum_link([rank.device for rank in members], self.machine)
        return count * link.latency + size * link.per_byte

    def meeting(self, seconds: float) -> float:
        """The time between two collectives of ranks that each take `seconds`: all wait for the slowest."""
        return seconds * (1 + max(PROFILES[rank.device.kind].jitter for rank in self.ranks))

    def copying(self, rank: RankPlan, size: int) -> float:
        """The time to copy `size` bytes within a rank's memory."""
        return 2 * size / rank_speed(rank.device, self.threads, 1, self.machine).bytes


def sum_link(devices: Sequence[Device], machine: Machine) -> Link:
    """The time of a sum over these devices: within hosts, then along a tree of hosts."""
    one, other = devices[:2]
    inside, across = machine.sum(one, other), machine.between_hosts(one, other)
    more = max(PROFILES[device.kind].more_ranks for device in devices)
    hosts = len({device.host for device in devices})
    steps = ((1 + more * (len(devices) - 2), inside), (float((hosts - 1).bit_length()), across))
    return Link(sum(times * link.latency for times, link in steps), sum(times * link.per_byte for times, link in steps))


def find_pace(device: Device, threads: int, at_once: int, machine: Machine, cached: bool = False) -> Pace:
    """The pace of one rank with this number of threads while `at_once` ranks work. See `rank_speed`."""
    speed, one = (rank_speed(device, count, at_once, machine, cached) for count in (threads, 1))
    return Pace(speed, one, PROFILES[device.kind])


def block_seconds(analysis: Analysis, resources: Resources, places: Iterable[int]) -> list[list[float]]:
    """The seconds of each block on the device at each place: measured, or estimated while all devices work."""
    by_kind: dict[tuple[str, object], list[float]] = {}  # of devices alike
    seconds = []
    for place in places:
        device = resources.devices[place]
        kind = (device.kind, resources.machine.speed(device))
        if kind not in by_kind:
            measured = resources.measured(analysis, place)
            by_kind[kind] = (
                estimate_blocks(analysis, resources, place, len(resources.devices))
                if measured is None
                else [block.seconds for block in measured]
            )
        seconds.append(by_kind[kind])
    return seconds


def estimate_blocks(analysis: Analysis, resources: Resources, place: int, at_once: int) -> list[float]:
    """The estimated seconds of each block on the device at `place`, while `at_once` devices work."""
    threads = threads_for(resources.devices, resources.threads)
    pace = find_pace(resources.devices[place], threads, at_once, resources.machine)
    return [pace.seconds(analysis.costs, block.nodes) for block in analysis.partition.blocks]


def rank_speed(device: Device, threads: int, at_once: int, machine: Machine, cached: bool = False) -> Speed:
    """The speed of one rank while `at_once` ranks work: measured on the machine, or from the device profile.

    CPU devices share the cores. They share the memory's bandwidth too, unless all data that they read is `cached`.
    """
    one = _unshared_speed(device, machine)
    if device.kind != "cpu":
        return one
    threads = min(threads, cores())
    at_once = min(at_once, cores() // threads)
    computing = _gain(HOST.thread_gain, threads)
    near = one.cached * computing
    if cached:
        return replace(one, flops=one.flops * computing, bytes=near, cached=near)
    crowded = HOST.crowded if at_once > 1 else 1.0
    reading = _all_read(one, threads * at_once, machine.speed(device).together) / at_once
    return replace(one, flops=one.flops * computing * crowded, bytes=reading, cached=near, cache=one.cache // at_once)


def _all_read(one: Speed, count: int, together: float | None) -> float:
    """The bytes per second of `count` cores: each as fast as one alone, up to the measured bandwidth of all cores."""
    if together is None:
        return one.bytes * _gain(HOST.bandwidth_gain, count)
    return max(one.bytes, min(one.bytes * count, together))


def _gain(share: float, count: int) -> float:
    """The speedup of `count` threads over one, if each further thread adds this `share` of the first one's speed."""
    return 1 + share * (count - 1)


def _unshared_speed(device: Device, machine: Machine) -> Speed:
    """The speed of a GPU, or of one CPU core."""
    nominal, measured = nominal_speed(device.kind), machine.speed(device)
    if device.kind != "cpu":
        return replace(nominal, flops=measured.flops or nominal.flops, bytes=measured.bytes or nominal.bytes)
    flops = measured.flops / _gain(HOST.thread_gain, cores()) if measured.flops else nominal.flops
    far, near = measured.bytes or nominal.bytes, measured.cached or HOST.cached
    return replace(nominal, flops=flops, bytes=far, cached=near, cache=cache_bytes())
