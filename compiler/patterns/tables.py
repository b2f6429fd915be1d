"""Computes tables of cosines and sines for generated positions, to compare their numbers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import cached_property
from itertools import islice

import msgspec
import numpy as np
import onnx_ir as ir

from splitc.compiler.graphs.alone import run_part
from splitc.compiler.graphs.reads import holds_graphs, read_sizes
from splitc.compiler.graphs.walks import producers, reached
from splitc.compiler.inference.observation import FAILURES
from splitc.compiler.nodes import inputs_of, known_tensor
from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.request.shapes import Shape
from splitc.compiler.sizes.made_up import choose_fill, describe_tensor
from splitc.compiler.sizes.roles import find_roles, planned_roles
from splitc.runtime.arrays.array import Array
from splitc.runtime.feeds.fills import make_inputs
from splitc.runtime.package.manifest import Fill, Role

# A table is not computed if that takes more nodes, or more elements of initializers and inputs. A choice: angles take
# some twenty nodes and a row of frequencies, or a table of a million.
MOST_NODES, MOST_ELEMENTS = 512, 1 << 24
# Generated positions are below this, unless a table limits them. A choice: any that are not 0 would do.
SOME_POSITIONS = 100


class Tables:
    """The tables that a model computes from positions.

    - `shapes`: the shapes of its values for the generated inputs.
    - `known`: the results of shape arithmetic, by name.
    - `rows`: the tables as RotaryEmbedding takes them, [rows, pairs], that were added so far.
    - `uncompared`: symbols of sizes that the data and the table share. The decomposed product failed if they differed;
      the operator does not.
    """

    def __init__(self, graph: Graph, shapes: Mapping[str, Shape], known: Mapping[str, Array]) -> None:
        self._graph, self._shapes, self.known = graph, shapes, known
        self._made: dict[ir.Value, Array | None] = {}
        self._sized: dict[ir.Value, Array | None] = {}
        self.rows: dict[Hashable, ir.Value] = {}
        self.uncompared: set[str] = set()

    def agree(self, table: ir.Value, interleaved: bool) -> bool:
        """Whether the two numbers of each pair are equal: neighbours if `interleaved`, else one in each half.

        False for a table whose numbers are all equal, as the cosines of position 0: it would prove nothing.
        """
        if table not in self._made:
            self._made[table] = self._compute(table)
        numbers = self._made[table]
        if numbers is None or numbers.ndim == 0 or numbers.shape[-1] % 2 or not numbers.size:
            return False
        one, other = (numbers[..., ::2], numbers[..., 1::2]) if interleaved else np.split(numbers, 2, -1)
        return bool(np.ptp(numbers, -1).max() > 0) and np.allclose(one, other, rtol=1e-5, atol=1e-6)

    def node_after(self, table: ir.Value) -> ir.Node:
        """The node after the one that makes a table. Nodes inserted before it precede all layers' readers."""
        maker = table.producer()
        return self._graph.nodes[0 if maker is None else self._graph.position[maker] + 1]

    def follow_from_sizes(self, value: ir.Value) -> Array | None:
        """The numbers of a value that depends only on sizes of inputs; None for others, and beyond MOST_NODES."""
        if value not in self._sized:
            known = self.known.get(value.name or "")
            self._sized[value] = self._compute(value, fed=False) if known is None else known
        return self._sized[value]

    def _compute(self, table: ir.Value, fed: bool = True) -> Array | None:
        """A table's numbers as float64; None if they take too much, fail, or need inputs and are not `fed`."""
        if table.const_value is not None:
            tensor = known_tensor(table)
            return None if tensor is None else tensor.numpy().astype(np.float64)
        above = reached(
            producers([table]), lambda node: () if self._sizes_of(node) is not None else producers(node.inputs)
        )
        made = list(islice(above, MOST_NODES + 1))
        sizes = {node.outputs[0]: array for node in made if (array := self._sizes_of(node)) is not None}
        nodes = [node for node in made if node.outputs[0] not in sizes]
        read = dict.fromkeys(value for node in nodes for value in inputs_of(node))
        weights = [value.const_value for value in read if value.const_value is not None]
        inputs = [value for value in self._graph.graph.inputs if value in read or value is table]
        elements = sum(tensor.size for tensor in weights) + sum(map(self._size, inputs))
        if len(made) > MOST_NODES or elements > MOST_ELEMENTS or any(map(holds_graphs, nodes)):
            return None
        if inputs and not fed:
            return None
        try:
            (numbers,) = run_part(self._graph.graph, {**self._made_up(inputs), **sizes}, [table])
        except FAILURES:
            return None
        return numbers.astype(np.float64)

    def _sizes_of(self, node: ir.Node) -> Array | None:
        """The result of a node that reads sizes only, such as Shape; None for other nodes, or unknown sizes."""
        shape = None
        if operator_of(node).reads_shape and node.inputs[0] is not None:
            shape = self._shapes.get(node.inputs[0].name or "")
        return None if shape is None else read_sizes(node, shape)

    def _size(self, value: ir.Value) -> float:
        return float(np.prod(self._shapes[value.name or ""], dtype=float))

    @cached_property
    def _roles(self) -> Mapping[ir.Value, Role]:
        return planned_roles(self._graph, find_roles(self._graph), self._shapes)

    def _made_up(self, inputs: list[ir.Value]) -> dict[ir.Value, Array]:
        """Generated inputs. Positions are random and above 0, where all cosines are 1."""
        tensors = []
        for value in inputs:
            fill = choose_fill(value, self._roles.get(value))
            if fill.kind == "arange":
                fill = Fill("randint", low=1, high=fill.high or SOME_POSITIONS)
            shape = [*self._shapes[value.name or ""]]
            tensors.append(msgspec.structs.replace(describe_tensor(value), fill=fill, sample_shape=shape))
        made = make_inputs(tensors)
        return {value: made[value.name or ""] for value in inputs}
