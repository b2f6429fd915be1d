"""Finds the experts of mixtures by structure: a router chooses among them for each token.

A router is a product, followed by a TopK (or an ArgMax) over the experts. The mixture lies between it and the node
where all paths from its choice meet again: it is computed from the router's input or from its choice. The experts'
weights are those of products in the mixture that have as many copies of one shape as there are experts, or an axis of
that size. For operators that are a whole mixture, the registry lists these inputs.

Experts, and tables, are what the planner may place by itself if blocks alone do not fit the budgets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from splitc.compiler.analysis.costs import Costs
from splitc.compiler.graphs.walks import ancestors, producers, reached
from splitc.compiler.inference.shapes import shape_of
from splitc.compiler.nodes import inputs_of
from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.placement.weights import WeightUse, placeable

# The fewest experts of a router.
FEWEST = 2
# Minimum share of the weights of a table that is placed. A choice: less relieves hardly any device.
LEAST_SHARE = 0.01


def find_experts(costs: Costs) -> list[list[ir.Value]]:
    """The experts' weights of each layer with experts, in the model's order."""
    uses = placeable(costs)
    by_reader: dict[ir.Node, list[ir.Value]] = defaultdict(list)
    for weight, use in uses.items():
        for node in use.readers:
            by_reader[node].append(weight)
    readers = _readers(costs.graph)
    layers = []
    known: set[ir.Value] = set()
    for node in costs.graph.nodes:
        weights = _of_operator(node, by_reader.get(node, ()), uses)
        if not weights and node.op_type in ("TopK", "ArgMax") and not node.domain:
            weights = _of_router(costs, node, by_reader, readers)
        if new := [weight for weight in weights if weight not in known]:
            layers.append(new)
            known.update(new)
    return layers


def _readers(graph: Graph) -> Mapping[ir.Node, Sequence[ir.Node]]:
    """The readers of each node's outputs."""
    readers: dict[ir.Node, list[ir.Node]] = defaultdict(list)
    for node, reads in graph.reads.items():
        for maker in dict.fromkeys(producers(reads)):
            readers[maker].append(node)
    return readers


def _of_operator(node: ir.Node, weights: Sequence[ir.Value], uses: Mapping[ir.Value, WeightUse]) -> list[ir.Value]:
    """The experts' weights of an operator that is a whole mixture."""
    numbers = operator_of(node).experts
    if not numbers:
        return []
    own = {value for number, value in enumerate(node.inputs) if number in numbers and value is not None}
    above = ancestors(producers(own), lambda maker: maker.inputs)  # type: ignore[arg-type, return-value]
    own |= {value for maker in above for value in inputs_of(maker)}
    return [weight for weight in weights if weight in own]


def _of_router(
    costs: Costs,
    choice: ir.Node,
    by_reader: Mapping[ir.Node, Sequence[ir.Value]],
    readers: Mapping[ir.Node, Sequence[ir.Node]],
) -> list[ir.Value]:
    """The experts' weights that a router's choice leads to; none if it chooses something else."""
    shape = shape_of(choice.inputs[0], costs.shapes)
    axis = choice.attributes.get_int("axis", -1 if choice.op_type == "TopK" else 0)
    if not shape or shape[axis] < FEWEST:
        return []
    count = shape[axis]
    router = _router_of(costs, choice, count)
    if router is None:
        return []
    for inside in _mixtures(costs.graph, choice, router, readers):
        weights = dict.fromkeys(weight for node in inside for weight in by_reader.get(node, ()))
        if experts := _of_so_many(costs, list(weights), count):
            return experts
    return []


def _of_so_many(costs: Costs, weights: Sequence[ir.Value], count: int) -> list[ir.Value]:
    """The weights that fit `count` experts: as many of one shape for each, or with an axis of that size.

    Empty unless there are matrices among them, one for each expert.
    """
    alike: dict[tuple[tuple[int, ...], ir.DataType | None], list[ir.Value]] = defaultdict(list)
    for weight in weights:
        alike[shape_of(weight, costs.shapes), weight.dtype].append(weight)
    own, matrices = [], False
    for (shape, _), same in alike.items():
        axes = len(shape) - 1 if shape and shape[0] == count and len(shape) > 1 else 0
        if not axes and len(same) >= count and len(same) % count == 0:
            axes = len(shape)
        own += same if axes else []
        matrices = matrices or axes > 1
    return own if matrices else []


def _router_of(costs: Costs, choice: ir.Node, count: int) -> ir.Node | None:
    """A router's product with a weight, with one score for each expert: the nearest product above its choice."""
    graph = costs.graph
    above = reached([choice], lambda node: producers(graph.reads[node]))
    products = (node for node in above if costs.is_product(node) and any(map(graph.is_constant, graph.reads[node])))
    nearest = next(products, None)
    # A choice among groups of experts has fewer scores than its router gives.
    return nearest if nearest is not None and shape_of(nearest.outputs[0], costs.shapes)[-1:] == (count,) else None


def _mixtures(
    graph: Graph, choice: ir.Node, router: ir.Node, readers: Mapping[ir.Node, Sequence[ir.Node]]
) -> Iterator[list[ir.Node]]:
    """Candidates for a choice's mixture: the nodes up to each node where all paths from it meet, nearest first.

    Nodes that the choice depends on are left out. The last candidate ends where all paths from the router's input meet
    too.
    """
    deciding = ancestors([choice], graph.reads.__getitem__)
    source = _source(graph, router)
    starts = [choice, *(node for node in graph.nodes if source is not None and source in graph.reads[node])]
    last = _meeting(graph, starts, readers)
    end = _meeting(graph, [choice], readers)
    while end is not None:
        below = set(reached(starts, lambda node, end=end: () if node is end else readers.get(node, ())))  # type: ignore[misc]
        above = ancestors([end], lambda node: () if node in deciding else graph.reads[node])
        yield [node for node in graph.nodes if node in below and node in above and node not in deciding]
        if end is last or last is None:
            return
        end = _meeting(graph, [end], readers)


def _meeting(graph: Graph, starts: Sequence[ir.Node], readers: Mapping[ir.Node, Sequence[ir.Node]]) -> ir.Node | None:
    """The first node on all paths from some nodes to the model's outputs; None if there is none."""
    after = sorted(reached(starts, lambda node: readers.get(node, ())), key=graph.position.__getitem__)
    begun: set[ir.Node] = set()
    pending: dict[ir.Node, int] = {}  # the number of each node's readers that are still to come
    for node in after:
        for maker in dict.fromkeys(producers(graph.reads[node])):
            if maker in pending:
                pending[maker] -= 1
                if not pending[maker]:
                    del pending[maker]
        if node in starts:
            begun.add(node)
        elif not pending and len(begun) == len(set(starts)):
            return node
        if any(value.is_graph_output() for value in node.outputs):
            return None
        pending[node] = len(readers.get(node, ()))
    return None


def _source(graph: Graph, router: ir.Node) -> ir.Value | None:
    """The computed value that a router reads, before casts and reshapes."""
    value = next((value for value in inputs_of(router) if not graph.is_constant(value)), None)
    while value is not None and (maker := value.producer()) is not None:
        if not operator_of(maker).is_view and maker.op_type != "Cast":
            break
        value = maker.inputs[0]
    return value


def reliefs(costs: Costs) -> list[list[ir.Value]]:
    """Groups of weights that need little traffic, those that relieve a device most first.

    Tokens go to the experts of a layer and come back, and rows come from a table: about the same traffic for each. So
    the largest groups move the fewest bytes for their size. Weights that stay in files relieve no device.
    """
    uses = placeable(costs)
    experts = find_experts(costs)
    known = {weight for layer in experts for weight in layer}
    least = LEAST_SHARE * sum(map(costs.value_bytes, uses))
    tables = [
        [weight]
        for weight, use in uses.items()
        if weight not in known
        and costs.value_bytes(weight) >= least
        and any(node.inputs[table] is weight for node in use.readers for _, table in operator_of(node).lookups)
    ]
    groups = [[weight for weight in group if weight not in costs.in_files] for group in (*experts, *tables)]
    return sorted(filter(None, groups), key=lambda group: -sum(map(costs.value_bytes, group)))
