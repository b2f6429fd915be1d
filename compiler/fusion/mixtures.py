"""Recognizes that a mixture's rows are sorted by their expert, and that their results are brought back in order.

Exporters write some 25 nodes for this, and the operator MoE sorts by itself. What the nodes compute is found by running
them, with a simple function in place of the experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np
import onnx_ir as ir

from splitc.compiler.graphs.alone import run_part
from splitc.compiler.graphs.matching import is_onnx, made_by, other_input, source_through, tensor_of
from splitc.compiler.graphs.origins import described
from splitc.compiler.graphs.walks import producers, reached
from splitc.compiler.nodes import known_tensor
from splitc.compiler.operators.row_groups import RowGroups
from splitc.compiler.request.shapes import Shape
from splitc.runtime.arrays.array import Array
from splitc.runtime.engines.onnxruntime_cpu import ERRORS

LOOKUPS = ("Gather", "GatherND")
# The most nodes between the sort of rows and where their groups end, and between the experts and the sorted results.
_MOST_NODES, _MOST_BEHIND = 24, 5
# Half precision rounds each of a few steps.
_TOLERANCE = 1e-2
# Of a part of a graph that is run: ONNX Runtime's, and those of values that it needs and are not known.
FAILURES: tuple[type[Exception], ...] = (*ERRORS, ValueError, IndexError)


@dataclass(frozen=True)
class Sorting:
    """The values around a mixture's experts.

    - `rows`: a row for each token, [tokens, size]. `count`: how many experts compute each.
    - `numbers`: the numbers of these experts, [tokens x count]. `shares`: by which their results are scaled, the same.
    - `made`: the scaled results in the order of `numbers`, [tokens x count, size], of the type of `shares`.
    - `biases`: what is added to the results of each expert before, [experts, size]; None without.
    """

    rows: ir.Value
    numbers: ir.Value
    shares: ir.Value
    made: ir.Value
    count: int
    biases: ir.Value | None = None


def find_sorting(result: ir.Value, first: RowGroups) -> Sorting | None:
    """The values around experts whose first products are these, and whose last ones' `result` this is."""
    rows, sort = made_by(first.rows, *LOOKUPS), _sort_before(first.ends)
    numbers = None if sort is None else sort.inputs[0]
    chosen = None if numbers is None else source_through(numbers, "Reshape")
    shape = None if chosen is None else described(chosen).shape
    count = shape[-1] if shape is not None and len(shape) > 1 else None
    if rows is None or rows.inputs[0] is None or numbers is None or not isinstance(count, int):
        return None
    shares, biases, value = None, None, result
    for _ in range(_MOST_BEHIND):
        uses = value.uses()
        if len(uses) != 1 or value.is_graph_output():
            return None
        ((node, place),) = uses
        if is_onnx(node, "Mul") and shares is None:
            shares = _looked_up(other_input(node, value))
        elif is_onnx(node, "Add") and biases is None and shares is None:
            biases = _looked_up(other_input(node, value))
            if known_tensor(biases) is None:
                return None
        elif is_onnx(node, *LOOKUPS) and place == 0 and shares is not None:
            sorting = Sorting(rows.inputs[0], numbers, shares, node.outputs[0], count, biases)
            return sorting if described(sorting.made).dtype == described(shares).dtype else None
        elif not is_onnx(node, "Identity") and (shares is not None or not is_onnx(node, "Cast")):
            return None  # an Identity stands for biases that another rank adds
        value = node.outputs[0]
    return None


def _looked_up(value: ir.Value | None) -> ir.Value | None:
    """What a Gather reads whose result this is."""
    lookup = None if value is None else made_by(source_through(value, "Unsqueeze", "Reshape"), *LOOKUPS)
    return None if lookup is None else lookup.inputs[0]


def _sort_before(ends: ir.Value) -> ir.Node | None:
    """The nearest TopK before the ends of groups."""
    above = islice(reached(producers([ends]), lambda node: producers(node.inputs)), _MOST_NODES)
    return next((node for node in above if is_onnx(node, "TopK")), None)


def only_sorts(
    graph: ir.Graph, sorting: Sorting, first: RowGroups, result: ir.Value, shapes: Mapping[str, Shape]
) -> bool:
    """Whether the nodes around experts only sort rows, scale results, and bring them back. One request is tried.

    `shapes` are those of all values for some request. Only the sizes of inputs may have a part in it.
    """
    size, dtype = shapes.get(sorting.rows.name or "", ()), sorting.rows.dtype
    if len(size) != 2 or dtype is None:
        return False
    random, count = np.random.default_rng(0), size[0] * sorting.count
    rows = random.uniform(-1, 1, size).astype(dtype.numpy())
    numbers = random.integers(0, first.count, count)
    shares = random.uniform(0, 1, count).astype((sorting.shares.dtype or dtype).numpy())
    factors = random.uniform(-1, 1, first.count).astype(np.float32)  # numpy is slow in half precision
    known = {**_zeros(graph, shapes), sorting.rows: rows, sorting.numbers: numbers}
    try:
        given, ends = run_part(graph, known, [first.rows, first.ends])
        own = np.searchsorted(ends, np.arange(len(given)), "right")
        scaled = given.astype(np.float32) * factors[own][:, None]
        known |= {sorting.shares: shares, result: scaled.astype(dtype.numpy())}
        (made,) = run_part(graph, known, [sorting.made])
    except FAILURES:
        return False
    expected = rows.astype(np.float32).repeat(sorting.count, 0) * factors[numbers][:, None]
    if sorting.biases is not None:
        expected += tensor_of(sorting.biases).numpy().astype(np.float32)[numbers]
    expected *= shares.astype(np.float32)[:, None]
    return made.shape == expected.shape and np.allclose(made.astype(np.float32), expected, atol=_TOLERANCE)


def _zeros(graph: ir.Graph, shapes: Mapping[str, Shape]) -> dict[ir.Value, Array]:
    """The graph's inputs: only their sizes count."""
    inputs = [value for value in graph.inputs if value.dtype is not None and value.name in shapes]
    return {value: np.zeros(shapes[value.name or ""], value.dtype.numpy()) for value in inputs if value.dtype}
