"""The nodes that go with placed weights, and the blocks without them.

The nodes that read placed weights go to their device. Products and lookups of other weights stay with the blocks. Nodes
in between go to the side for which fewer bytes cross, which is a minimum cut.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

import onnx_ir as ir

from splitc.compiler.adapters.slots import is_inside_slot
from splitc.compiler.analysis.blocks import PLACED, Block, Partition, Placed
from splitc.compiler.analysis.costs import Costs
from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.analysis.rematerialization import find_upstream
from splitc.compiler.graphs.walks import producers
from splitc.compiler.nodes import describe_node, inputs_of
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.placement.least_cut import Network
from splitc.compiler.placement.weights import placeable, weight_uses
from splitc.runtime.errors import MisuseError
from splitc.runtime.package.states import State

# The latency of a transfer, in bytes, which is added to a value's own. A choice: of two cuts with about the same bytes,
# the one with fewer values is chosen.
TRANSFER = 64 << 10
# More than all bytes that could cross: such an edge is cut only if nothing else separates two devices.
NEVER = 1 << 60


def with_placed(analysis: Analysis, devices: Mapping[ir.Value, str]) -> Analysis:
    """The analysis with these weights, and the nodes that go with them, moved from the blocks to their devices.

    Raises MisuseError if a node reads weights of two devices, and if no block is left.
    """
    if not devices:
        return analysis
    graph, partition = analysis.graph, analysis.partition
    fixed = _fixed(analysis, devices)
    released = _released(analysis, fixed)
    blocks = _with_released(analysis, released)
    movable = [node for block in blocks for node in block.nodes]
    staying = _staying(analysis.costs, movable, devices)
    gone: dict[ir.Node, str] = {}
    names = list(dict.fromkeys(devices.values()))
    for name in names:
        own = {node for node, device in fixed.items() if device == name}
        left = [node for node in movable if node not in gone]
        gone.update(dict.fromkeys(_going(analysis, left, own, (staying | fixed.keys()) - own), name))
    rematerializable = partition.rematerializable - released
    placed = tuple(
        Placed(
            name,
            tuple(weight for weight, device in devices.items() if device == name),
            tuple(_parts(blocks, {node for node, device in gone.items() if device == name}, PLACED)),
        )
        for name in names
    )
    rest = tuple(_parts(blocks, set(movable) - gone.keys()))
    if not rest:
        raise MisuseError(
            f"all of the model would go to {', '.join(names)}, with the weights that are placed there: place fewer, or "
            "leave the blocks to the planner (-d)"
        )
    upstream = find_upstream(graph, rematerializable, partition.shapes, movable)
    return replace(
        analysis, partition=Partition(rest, partition.finest, rematerializable, partition.shapes, upstream, placed)
    )


def on_devices(analysis: Analysis, names: Mapping[str, str]) -> Analysis:
    """The analysis with placed weights on other devices. `names` maps the previous devices to these."""
    if not analysis.partition.placed:
        return analysis  # the same object, for which results are remembered
    placed = tuple(replace(own, device=names[own.device]) for own in analysis.partition.placed)
    return replace(analysis, partition=replace(analysis.partition, placed=placed))


def _fixed(analysis: Analysis, devices: Mapping[ir.Value, str]) -> dict[ir.Node, str]:
    """The nodes that read placed weights, and their devices."""
    uses = weight_uses(analysis.graph)
    because: dict[ir.Node, ir.Value] = {}
    for weight, device in devices.items():
        for node in uses[weight].readers:
            first = because.setdefault(node, weight)
            if devices[first] != device:
                raise MisuseError(
                    f"{describe_node(node)} reads '{first.name}', which is placed on "
                    f"{devices[first]}, and '{weight.name}', which is placed on {device}: place both on one device"
                )
    return {node: devices[weight] for node, weight in because.items()}


def _released(analysis: Analysis, fixed: Collection[ir.Node]) -> frozenset[ir.Node]:
    """The nodes that ranks can't rematerialize any more, since they depend on placed weights."""
    cheap, graph = analysis.partition.rematerializable, analysis.graph
    released: set[ir.Node] = set()
    for node in graph.nodes:
        reads_size = node in analysis.partition.shapes
        above = not reads_size and any(maker in released for maker in producers(graph.reads[node]))
        if node in cheap and (above or node in fixed):
            released.add(node)
    return frozenset(released)


def _with_released(analysis: Analysis, released: Collection[ir.Node]) -> list[Block]:
    """The blocks with the released nodes, each at the beginning of the first block that needs it."""
    graph, blocks = analysis.graph, analysis.partition.blocks
    home = {node: number for number, block in enumerate(blocks) for node in block.nodes}
    needed: dict[ir.Node, int] = {}
    for node in reversed(graph.nodes):
        own = home[node] if node in home else needed.get(node, 0)
        for maker in producers(graph.reads[node]):
            if maker in released:
                needed[maker] = min(needed.get(maker, own), own)
    added: dict[int, list[ir.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node in released:
            added[needed.get(node, 0)].append(node)
    return [replace(block, nodes=(*added[number], *block.nodes)) for number, block in enumerate(blocks)]


def _staying(costs: Costs, nodes: Iterable[ir.Node], devices: Collection[ir.Value]) -> set[ir.Node]:
    """The products and lookups of weights that are not placed, except slots, which go with their layers."""
    uses = placeable(costs)
    others = {node for weight, use in uses.items() if weight not in devices for node in use.readers}
    return {node for node in nodes if node in others and (costs.is_product(node) or operator_of(node).reads_part)}


def _parts(blocks: Sequence[Block], nodes: AbstractSet[ir.Node], kind: str | None = None) -> Iterable[Block]:
    """The blocks with only these nodes, without empty ones."""
    for block in blocks:
        if own := tuple(node for node in block.nodes if node in nodes):
            yield Block(block.name, kind or block.kind, own)


def _going(
    analysis: Analysis, nodes: Sequence[ir.Node], fixed: Collection[ir.Node], staying: Collection[ir.Node]
) -> set[ir.Node]:
    """The nodes that go to a device with the `fixed` ones, so that the fewest bytes cross."""
    network = Network()
    tied = list(_tied(analysis.states, nodes, analysis.graph.reads))
    values = _values(nodes, analysis.graph.reads)
    sizes = _sizes(analysis.costs, values)
    for value, (maker, readers) in values.items():
        # No engine could tell whether a request has an adapter if its slot began on another device.
        apart = value.dtype is not None and not is_inside_slot(maker)
        cost = sizes[value] + TRANSFER if apart else NEVER
        # Cut once in each direction, no matter how many of its readers are on the other side.
        sent, sent_back = ("sent", value), ("sent back", value)
        network.add(maker, sent, cost)
        network.add(sent_back, maker, cost)
        for reader in readers:
            network.add(sent, reader, NEVER)
            network.add(reader, sent_back, NEVER)
    for one, other in tied:
        network.add(one, other, NEVER, back=NEVER)
    going = network.cut([node for node in nodes if node in fixed], staying)
    for one, other in tied:
        if (one in going) != (other in going):
            raise MisuseError(
                f"{describe_node(one)} and {describe_node(other)} keep a state on "
                "one device, and the weights of one of them are placed on another: place those of both, or of neither"
            )
    return {node for node in nodes if node in going}


def _values(
    nodes: Sequence[ir.Node], reads: Mapping[ir.Node, tuple[ir.Value, ...]]
) -> dict[ir.Value, tuple[ir.Node, list[ir.Node]]]:
    """The values between nodes, each with its producer and its readers among them."""
    inside = set(nodes)
    values: dict[ir.Value, tuple[ir.Node, list[ir.Node]]] = {}
    for node in nodes:
        for value in dict.fromkeys(reads[node]):
            maker = value.producer()
            if maker is not None and maker in inside:
                values.setdefault(value, (maker, []))[1].append(node)
    return values


def _tied(
    states: Iterable[State], nodes: Sequence[ir.Node], reads: Mapping[ir.Node, tuple[ir.Value, ...]]
) -> Iterable[tuple[ir.Node, ir.Node]]:
    """Nodes that stay together: a state's readers and the producer of its next value, which a device keeps."""
    readers: dict[str, list[ir.Node]] = defaultdict(list)
    makers: dict[str, ir.Node] = {}
    for node in nodes:
        makers.update({value.name or "": node for value in node.outputs})
        for value in reads[node]:
            readers[value.name or ""].append(node)
    for state in states:
        together = [*readers[state.input], *([makers[state.output]] if state.output in makers else [])]
        yield from itertools.pairwise(together)


def _sizes(costs: Costs, values: Mapping[ir.Value, tuple[ir.Node, Sequence[ir.Node]]]) -> dict[ir.Value, int]:
    """Bytes of values. A value whose size depends on data is assumed to be as large as its producer's inputs."""
    sizes: dict[ir.Value, int] = {}
    for value, (maker, _) in values.items():
        sizes[value] = costs.value_bytes(value)
        if value.name in costs.bound.uncertain:
            computed = (read for read in inputs_of(maker) if not read.is_initializer())
            sizes[value] = max(sizes[value], *(sizes.get(read, 0) or costs.value_bytes(read) for read in computed), 0)
    return sizes
