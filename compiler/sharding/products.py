"""Row mode: the products that it can slice by columns, why others can't be, and which columns each rank computes.

A product is a MatMul, or the like, inside a block, of a computed value and a large matrix that only products read. Its
input is sent to all ranks. Each rank multiplies it by its slice of the matrix, and the main rank (rank 0) joins the
columns. Megatron calls this column-parallel. The name `row` is llama.cpp's, which stores matrices transposed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import onnx_ir as ir

from splitc.compiler.adapters.slots import is_inside_slot
from splitc.compiler.analysis.blocks import Partition
from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.inference.shapes import shape_of
from splitc.compiler.nodes import describe_node, unused_name
from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Axis, Factor
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.sharding.axis_map import AxisMap, find_axes_separately
from splitc.compiler.sharding.candidates import reached_weights
from splitc.compiler.sharding.sharded_model import ShardedModel
from splitc.compiler.sharding.shares import assign_units
from splitc.runtime.units import format_shape

Readers = Mapping[ir.Value, tuple[ir.Node, ...]]


@dataclass(frozen=True)
class Product:
    """A matmul that can be sliced.

    - `takes`: the non-constant values that it reads. An input that is dequantized for the matmul is sent quantized:
      that is smaller, and engines multiply it directly.
    - `columns`: the factor that is sliced. Its unit is a column, or the columns of one quantization block.
    - `axis`: the axis of the columns in the result.
    """

    node: ir.Node
    takes: tuple[ir.Value, ...]
    columns: Factor
    axis: int

    @property
    def result(self) -> ir.Value:
        """Its output."""
        return self.node.outputs[0]


@dataclass(frozen=True)
class Declined:
    """The reason why a node that reads weights is not sliced, and a short kind for summaries."""

    kind: str
    reason: str


@dataclass(frozen=True)
class Products:
    """The products in the model's order, and the axes of the values that they read.

    - `readers`: for each weight, the nodes that read it, or a value folded from it, at run time.
    - `declined`: for each reader that is not a product, the reason.
    """

    sliceable: tuple[Product, ...]
    axis_map: AxisMap
    readers: Readers
    declined: Mapping[ir.Node, Declined]


def find_products(analysis: Analysis, least: int, opaque: Mapping[ir.Node, str] = MappingProxyType({})) -> Products:
    """The products of a model whose matrices are at least `least` x `least`.

    The axes of `opaque` nodes are whole, each with the reason.
    """
    graph = analysis.graph
    readers = _readers(graph)
    inside = _inside_blocks(analysis.partition)
    nodes = sorted({node for nodes in readers.values() for node in nodes}, key=graph.position.__getitem__)
    reasons = {node: _why_not(analysis, node, node in inside, least) for node in nodes}
    declined = {node: reason for node, reason in reasons.items() if reason is not None}
    _decline_shared(readers, declined)
    candidates = [node for node in nodes if node not in declined]
    unpacking = _unpacking(graph, candidates)
    axis_map = find_axes_separately(graph, analysis.costs.certain, [*candidates, *unpacking], opaque)
    read = (pair for node in candidates for pair in axis_map.operations[node].reads())
    # These are not sliced: the inputs of products would have to be sliced too.
    at_run_time = {atom for value, axes in read if not graph.is_constant(value) for atom in ax.atoms_of(axes)}
    stored = axis_map.weight_atoms()
    columns = {node: _columns(axis_map, node, at_run_time, stored) for node in candidates}
    declined.update({node: factor for node, factor in columns.items() if isinstance(factor, Declined)})
    _decline_shared(readers, declined)
    products = [
        Product(node, tuple(_taken(graph, node, unpacking)), factor, len(axis_map.operations[node].output()) - 1)
        for node, factor in columns.items()
        if isinstance(factor, Factor) and node not in declined
    ]
    return Products(tuple(products), axis_map, readers, declined)


def _readers(graph: Graph) -> Readers:
    """For each weight, the nodes that read it, or a value folded from it, at run time.

    A folded node whose result is a model output counts as a reader.
    """

    def is_read(node: ir.Node) -> bool:
        return node not in graph.constant or any(value.is_graph_output() for value in node.outputs)

    return {weight: tuple(filter(is_read, nodes)) for weight, nodes in graph.uses.items()}


def _inside_blocks(partition: Partition) -> frozenset[ir.Node]:
    """The nodes of repeated blocks, and the rematerializable nodes that only repeated blocks need."""
    inside: set[ir.Node] = set()
    outside: set[ir.Node] = set()
    for block in partition.blocks:
        (inside if block.kind == "block" else outside).update(partition.with_upstream(block))
    return frozenset(inside - outside)


def _unpacking(graph: Graph, nodes: Iterable[ir.Node]) -> frozenset[ir.Node]:
    """The nodes that dequantize inputs of `nodes`, with constant scales."""
    above = (value.producer() for node in nodes for value in graph.reads[node])
    return frozenset(
        node
        for node in above
        if node is not None
        and node not in graph.constant
        and operator_of(node).dequantizes
        and all(value is None or graph.is_constant(value) for value in node.inputs[1:])
    )


def _taken(graph: Graph, node: ir.Node, unpacking: Collection[ir.Node]) -> dict[ir.Value, None]:
    """The values that a product takes at run time: its non-constant inputs, before they are dequantized."""
    taken: dict[ir.Value, None] = {}
    for value in graph.reads[node]:
        producer = value.producer()
        if producer is not None and producer in unpacking:
            taken.update(_taken(graph, producer, ()))
        elif not graph.is_constant(value):
            taken[value] = None
    return taken


def _why_not(analysis: Analysis, node: ir.Node, inside: bool, least: int) -> Declined | None:
    """The reason why a node that reads weights can't be sliced; None if it can."""
    number = operator_of(node).matrix_input
    weight = node.inputs[number] if number is not None and number < len(node.inputs) else None
    if node in analysis.graph.constant or weight is None:
        return Declined(f"read by {node.op_type}", f"{describe_node(node)}, which is not a matmul, reads it")
    if not analysis.graph.is_constant(weight):
        reason = f"{describe_node(node)} reads it, but not as its weight matrix"
        return Declined("not the weight matrix of a matmul", reason)
    if is_inside_slot(node):
        return Declined("of adapters", f"{describe_node(node)} belongs to an adapter")
    if not inside:
        return Declined("outside the blocks", f"{describe_node(node)} is outside the blocks")
    sides = _sides(analysis, node, weight)
    shape = format_shape(sides)
    if len(sides) > 2:
        return Declined("stacks of matrices", f"{describe_node(node)} multiplies by {shape}, which is not a matrix")
    if len(sides) < 2 or min(sides) < least:
        reason = f"{describe_node(node)} multiplies by {shape}, and --row-min is {least}"
        return Declined(f"smaller than {least} x {least}", reason)
    return None


def _sides(analysis: Analysis, node: ir.Node, weight: ir.Value) -> list[int]:
    """The shape of a product's matrix, without leading axes of size 1."""
    if node.op_type == "MatMulNBits":
        return [node.attributes.get_int("K", 0), node.attributes.get_int("N", 0)]
    sides = list(shape_of(weight, analysis.costs.shapes))
    while len(sides) > 2 and sides[0] == 1:
        del sides[0]
    return sides


def _decline_shared(readers: Readers, declined: dict[ir.Node, Declined]) -> None:
    """Decline every node that shares a matrix with a declined one, until no more are found."""
    again = True
    while again:
        again = False
        for weight, nodes in readers.items():
            other = next((declined[node] for node in nodes if node in declined), None)
            if other is not None and _is_matrix(weight):
                for node in (node for node in nodes if node not in declined):
                    reason = f"{other.reason} (it shares '{weight.name}' with {describe_node(node)})"
                    declined[node] = Declined(other.kind, reason)
                    again = True


def _is_matrix(weight: ir.Value) -> bool:
    """Whether a weight has two or more axes. Vectors (scales, biases) may be sliced for some readers only."""
    return sum(size != 1 for size in shape_of(weight)) > 1


def _columns(
    axis_map: AxisMap, node: ir.Node, at_run_time: Collection[Factor], stored: Collection[Factor]
) -> Factor | Declined:
    """The factor by which to slice a product's columns contiguously, or the reason why there is none.

    `at_run_time` are the factors of products' computed inputs, `stored` those of weights. A matrix that is filled with
    one number at run time has none.
    """
    output = axis_map.operations[node].outputs[0]
    leaves = ax.leaves(output[-1]) if output else []
    reason = ""
    if not leaves:
        reason = f"{describe_node(node)} has an output whose columns are not known"
    elif not leaves[0].is_atom:
        reason = f"{describe_node(node)} multiplies by several concatenated matrices"
    elif (pin := leaves[0].pinned) is not None:
        by = describe_node(pin.node) if pin.node is not None else describe_node(node)
        reason = f"{by} needs all {leaves[0].size} columns whole" + (f" ({pin.reason})" if pin.reason else "")
    elif leaves[0] in at_run_time:
        reason = f"{describe_node(node)} has an input with the same axis as its columns"
    elif leaves[0] not in stored:
        reason = f"{describe_node(node)} multiplies by a computed matrix, not by a weight"
    return Declined("needed whole", reason) if reason else leaves[0]


@dataclass(frozen=True)
class Work:
    """A rank's work in a round: values that it receives for the first time, and products that it has columns of."""

    takes: tuple[ir.Value, ...]
    products: tuple[Product, ...]


@dataclass(frozen=True)
class SlicedProducts:
    """The sliced products, and each rank's columns.

    - `rounds`: the products in the order in which they run. Those of one round are independent.
    - `columns`: a sharded model of the products alone, without collectives.
    """

    graph: Graph
    rounds: tuple[tuple[Product, ...], ...]
    columns: ShardedModel

    @cached_property
    def products(self) -> Mapping[str, Product]:
        """The products by the name of their result."""
        return {product.result.name or "": product for products in self.rounds for product in products}

    def ranks(self, product: Product) -> list[int]:
        """The ranks that have columns of a product."""
        return [number for number, part in enumerate(self.columns.ranges[product.columns]) if part.owned]

    def width(self, rank: int, product: Product) -> int:
        """The number of a product's columns that a rank has."""
        return self.columns.shards(rank).size(self._columns(product))

    def share(self, rank: int, product: Product) -> float:
        """A rank's share of a product's columns."""
        return self.columns.shards(rank).share((self._columns(product),))

    def _columns(self, product: Product) -> Axis:
        return self.columns.axis_map.operations[product.node].output()[-1]

    def of_rank(self, rank: int, products: Iterable[Product] | None = None) -> list[Product]:
        """Those of some products, by default of all, that the rank has columns of."""
        some = self.products.values() if products is None else products
        return [product for product in some if self.columns.ranges[product.columns][rank].owned]

    def column_name(self, rank: int, product: Product) -> str:
        """The name, on all ranks, of a rank's columns of a product's result. No value of the model has it."""
        return unused_name(f"{product.result.name}/rank{rank}", self._names)

    @cached_property
    def _names(self) -> frozenset[str | None]:
        graph = self.graph.graph
        computed = (value for node in graph for value in node.outputs)
        return frozenset(value.name for value in (*graph.inputs, *graph.initializers.values(), *computed))

    def work(self, rank: int) -> list[Work]:
        """A rank's work in each round."""
        taken: dict[ir.Value, None] = {}
        rounds = []
        for products in self.rounds:
            own = self.of_rank(rank, products)
            takes = dict.fromkeys(value for product in own for value in product.takes if value not in taken)
            taken.update(takes)
            rounds.append(Work(tuple(takes), tuple(own)))
        return rounds


def slice_products(analysis: Analysis, products: Products, shares: Sequence[float]) -> ShardedModel:
    """Divide the products' columns among the ranks by their shares.

    A product stays unsplit if the main rank has all its columns.
    """
    reached = reached_weights(products.axis_map, analysis.costs.value_bytes)
    atoms = dict.fromkeys(product.columns for product in products.sliceable)
    divided = assign_units({atom: reached[atom] for atom in atoms}, [shares])
    ranges = {atom: parts for atom, parts in divided.items() if any(part.owned for part in parts[1:])}
    return ShardedModel(analysis.graph, products.axis_map, ranges, len(shares))
