"""Row mode: which columns of each product a rank computes.

A product's input is sent to all ranks. Each rank multiplies it by its slice of the matrix, and the main rank (rank 0)
joins the columns. Megatron calls this column-parallel. The name `row` is llama.cpp's, which stores matrices transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from splitc.compiler.frontend.graph import Graph
from splitc.compiler.nodes import unused_name
from splitc.compiler.operators.axes import Axis
from splitc.compiler.sharding.candidates import reached_weights
from splitc.compiler.sharding.products import Product, Products
from splitc.compiler.sharding.sharded_model import ShardedModel
from splitc.compiler.sharding.shares import assign_units


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

    def of_rank(self, rank: int, products: Collection[Product]) -> list[Product]:
        """The products that the rank has columns of."""
        return [product for product in products if self.columns.ranges[product.columns][rank].owned]

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


def slice_products(
    graph: Graph, products: Products, shares: Sequence[float], size: Callable[[ir.Value], int]
) -> ShardedModel:
    """Divide the products' columns among the ranks by their shares. `size` gives the bytes of a value.

    A product stays unsplit if the main rank has all its columns.
    """
    reached = reached_weights(products.axis_map, size)
    atoms = dict.fromkeys(product.columns for product in products.sliceable)
    divided = assign_units({atom: reached[atom] for atom in atoms}, [shares])
    ranges = {atom: parts for atom, parts in divided.items() if any(part.owned for part in parts[1:])}
    return ShardedModel(graph, products.axis_map, ranges, len(shares))
