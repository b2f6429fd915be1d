"""Tries one node of a model with some of its rows, at the sizes with which axes were found.

Tiny nodes have made-up sizes, which need not fit together: a Slice whose bounds follow from other sizes then has
another length than its rule says. Here such bounds are the model's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from splitc.compiler.graphs.alone import node_alone, run_alone
from splitc.compiler.graphs.reads import holds_graphs
from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Factor
from splitc.compiler.operators.operation import Axes, Operation
from splitc.compiler.request.shapes import Shape
from splitc.compiler.trials.forms import is_tried
from splitc.compiler.trials.made_up import made_up
from splitc.runtime.arrays.array import Array
from splitc.runtime.tools.compare import compare

# The most elements of an input: a plan reads no large weights. A choice: a second in ONNX Runtime.
MOST_ELEMENTS = 1 << 26


def holds_by_rows(
    operation: Operation, rows: Factor, shapes: Mapping[str, Shape], values: Mapping[ir.Value, Array]
) -> bool:
    """Whether a node computes each of its rows by itself, with made-up data. `values` are those that follow from sizes.

    False for a node that can't be tried like this.
    """
    node = operation.node
    places = [_place(axes, rows) for axes in (*operation.inputs, *operation.outputs)]
    if holds_graphs(node) or -1 in places or any(map(_is_large, operation.inputs)):
        return False
    taken, given = places[: len(node.inputs)], places[len(node.inputs) :]
    kept = [value is None or value.const_value is not None for value in node.inputs]
    try:
        arrays = [
            None if is_kept or value is None else values.get(value, _made_up(operation, number, shapes))
            for number, (value, is_kept) in enumerate(zip(node.inputs, kept, strict=True))
        ]
        whole = _run(node, arrays)
        parts = [_run(node, _cut(arrays, taken, part)) for part in (slice(0, 1), slice(1, rows.size))]
    except Exception:  # if ONNX Runtime or numpy raises anything, the node was not tried
        return False
    named = [number for number, value in enumerate(node.outputs) if value.name]
    return all(
        _agree(expected, pieces, given[number])
        for number, expected, *pieces in zip(named, whole, *parts, strict=True)
        if is_tried(node.outputs[number], operation.outputs[number])
    )


def _agree(expected: Array, pieces: Sequence[Array], place: int | None) -> bool:
    """Whether pieces along axis `place` are the expected result; without such an axis, whether each of them is."""
    if place is None:
        return all(np.array_equal(piece, expected) for piece in pieces)
    joined = np.concatenate(pieces, place)
    (difference,) = compare({"": expected}, {"": joined}, number_type=str(expected.dtype))
    return joined.shape == expected.shape and difference.passed


def _place(axes: Axes, rows: Factor) -> int | None:
    """The axis that is the rows; None if there is none, -1 if rows are only a factor of an axis."""
    along = [number for number, axis in enumerate(axes or ()) if rows in ax.atoms(axis)]
    if not along:
        return None
    alone = len(along) == 1 and ax.leaves((axes or ())[along[0]]) == [rows]
    return along[0] if alone else -1


def _is_large(axes: Axes) -> bool:
    return math.prod(map(ax.size_of, axes or ())) > MOST_ELEMENTS


def _made_up(operation: Operation, number: int, shapes: Mapping[str, Shape]) -> Array:
    """Data for an input. Raises KeyError for one of unknown shape."""
    value = operation.node.inputs[number]
    assert value is not None and value.dtype is not None
    return made_up(operation, number, shapes[value.name or ""], value.dtype, "rows")


def _cut(arrays: Sequence[Array | None], places: Sequence[int | None], part: slice) -> list[Array | None]:
    return [
        array if array is None or place is None else array[(slice(None),) * place + (part,)]
        for array, place in zip(arrays, places, strict=True)
    ]


def _run(node: ir.Node, arrays: Sequence[Array | None]) -> list[Array]:
    given = {number: np.ascontiguousarray(array) for number, array in enumerate(arrays) if array is not None}
    graph = node_alone(node, lambda value: value.const_value is not None, [array.shape for array in given.values()])
    return run_alone(graph, {f"input{number}": array for number, array in given.items()})
