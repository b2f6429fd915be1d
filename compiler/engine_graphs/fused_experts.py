"""Writes recognized mixtures of experts (fusion/experts.py) as the operator MoE, in engines for GPUs.

The operator chooses each row's experts itself, and scales their results by their shares. Here each row has a single
expert already: rows are sorted by their expert, and scaled behind. So it gets one choice a row, whose share is 1. Its
kernels read the matrices transposed, and the columns of gates and values in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from splitc.compiler.engine_graphs.attention_nodes import Nodes, put_in_place
from splitc.compiler.engine_graphs.few_rows import count_rows, row_numbers
from splitc.compiler.fusion.experts import (
    GATES_FIRST,
    GATES_LAST,
    GATES_ODD,
    OPERATOR,
    Activation,
    experts_before,
    fits,
)
from splitc.compiler.fusion.mixtures import Sorting, find_sorting
from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.lazy_tensors import JoinedTensor, computed, part_of_stack
from splitc.compiler.graphs.matching import tensor_of
from splitc.compiler.graphs.origins import described, origin_of
from splitc.compiler.graphs.unused import remove_unused
from splitc.compiler.graphs.walks import producer_of
from splitc.compiler.nodes import MICROSOFT
from splitc.compiler.operators.row_groups import EXPERTS, RowGroups
from splitc.runtime.arrays.array import Array

Turn = Callable[[Array], Array]


def fuse_experts(graph: ir.Graph) -> None:
    """Replace the products of marked experts by the operator, in place."""
    editor, replaced = Editor(graph), False
    for node in list(graph):
        activation: Activation | None = (origin_of(node) or node).meta.get(EXPERTS)
        experts = None if activation is None else experts_before(node)
        if activation is None or experts is None or not fits(experts):
            continue
        b = Nodes(f"{node.outputs[0].name}/experts", editor)
        sorting = find_sorting(node.outputs[0], experts.first) if activation.sorts else None
        if sorting is None:
            rows, choices, second = experts.first.rows, _choices(experts.first, b), experts.second
        else:
            rows, choices = _repeated(sorting, experts.sizes[0], b), _chosen(sorting, experts.first, b)
            second = replace(experts.second, biases=sorting.biases or experts.second.biases)
        weights = [*_weights(experts.first, activation, editor), *_weights(second, Activation({}), editor)]
        how = {"k": 1, "normalize_routing_weights": 1, **activation.attributes}
        made = b.one(OPERATOR, rows, choices, *weights, domain=MICROSOFT, **how)
        if sorting is not None:
            node = producer_of(sorting.made)
            dtype = described(sorting.shares).dtype
            wide = made if dtype == described(sorting.rows).dtype else b.one("Cast", made, to=dtype)
            made = b.one("Mul", wide, b.shaped(sorting.shares, -1, 1))
        put_in_place(node, b.made, [made])
        replaced = True
    if replaced:
        graph.opset_imports.setdefault(MICROSOFT, 1)
        remove_unused(graph)


def _repeated(sorting: Sorting, size: int, b: Nodes) -> ir.Value:
    """Each row for each of its experts, [tokens x count, size]."""
    alone = b.one("Unsqueeze", sorting.rows, b.editor.numbers(1))
    return b.shaped(b.one("Expand", alone, b.editor.numbers(1, sorting.count, 1)), -1, size)


def _chosen(sorting: Sorting, groups: RowGroups, b: Nodes) -> ir.Value:
    """As `_choices`, of the experts' numbers themselves."""
    dtype = described(sorting.rows).dtype
    assert dtype is not None
    experts = b.editor.numbers(*range(groups.count))
    is_own = b.one("Equal", b.shaped(sorting.numbers, -1, 1), experts)
    return b.one("Cast", is_own, to=dtype)


def _choices(groups: RowGroups, b: Nodes) -> ir.Value:
    """A number for each row and expert, [rows, experts]: the largest is that of the row's expert.

    That is the first expert whose rows end behind the row.
    """
    _, count = count_rows(groups.rows, b)
    numbers = row_numbers(count, b)
    dtype = described(groups.rows).dtype
    assert dtype is not None
    descending = b.editor.constant(np.arange(groups.count, 0, -1).astype(dtype.numpy()))
    return b.one(
        "Where", b.one("Less", numbers, groups.ends), descending, b.editor.constant(np.array(-1, dtype.numpy()))
    )


def _weights(groups: RowGroups, activation: Activation, editor: Editor) -> list[ir.Value | None]:
    """The experts' matrices, [experts, columns, inner], and their biases, as the operator reads them."""
    order = _order(activation.gates)
    matrices = tensor_of(groups.matrices)
    made: list[ir.Value | None] = [_turned(matrices, lambda array: order(array.swapaxes(1, 2)), editor)]
    made.append(None if groups.biases is None else _turned(tensor_of(groups.biases), order, editor))
    return made


def _order(gates: str | None) -> Turn:
    """A function that orders columns, along the second axis, such that each gate is followed by its value."""

    def order(array: Array) -> Array:
        if gates in (GATES_FIRST, GATES_LAST):
            halves = np.split(array, 2, 1)
            array = np.stack(halves if gates == GATES_FIRST else halves[::-1], 2).reshape(array.shape)
        elif gates == GATES_ODD:
            array = np.stack([array[:, 1::2], array[:, ::2]], 2).reshape(array.shape)
        return array

    return order


def _turned(tensor: ir.TensorProtocol, turn: Turn, editor: Editor) -> ir.Value:
    """A weight whose first axis is that of experts, each of them turned. It is read, one by one, when it is written."""
    count, *sizes = tensor.shape.numpy()
    shape = turn(np.empty((1, *sizes), np.bool_)).shape
    names = [f"{tensor.name}[{number}]" for number in range(count)]
    parts = [part_of_stack(tensor, number, name) for number, name in enumerate(names)]
    turned = [computed(part, shape, part.name or "", lambda array: turn(array[None])) for part in parts]
    return editor.weight(JoinedTensor(turned, 0, f"{tensor.name}/turned"))
