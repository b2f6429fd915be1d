"""Lets mixtures of experts have sizes that do not depend on data, in engines for GPUs, where a request has few rows.

PyTorch's exporters multiply each expert's rows by themselves (operators/row_groups.py). How many there are is read on
the CPU for each expert, so the graph can't be captured, and a token of 128 experts takes hundreds of kernels a layer.
If there are few rows, as for a token, an If on sizes copies the matrix of each row's expert instead, and multiplies all
rows at once. More rows, as of a prompt, take the other branch, which multiplies each expert's.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from splitc.compiler.engine_graphs.attention_nodes import Nodes, put_in_place
from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.origins import described
from splitc.compiler.graphs.unused import remove_unused
from splitc.compiler.operators.row_groups import (
    RowGroups,
    find_row_groups,
    inside,
    inside_experts,
    matrices_shape,
    most_copied,
)

# The first opset in which all of the operators exist as they are used here.
OPSET = 13
# This key of an If's `meta` has the branch for few rows: a request that takes the other can't be captured. Nodes
# of that branch have the key too.
FEW_ROWS = "splitc.few_rows"


def copy_matrices_of_few_rows(graph: ir.Graph) -> None:
    """Replace each product of grouped rows by an If that copies matrices where there are few rows, in place."""
    editor, chosen = Editor(graph), find_copied(graph)
    for node, (groups, most) in chosen.items():
        _choose(node, groups, most, editor)
    if chosen:
        remove_unused(graph)


def find_copied(graph: ir.Graph) -> dict[ir.Node, tuple[RowGroups, int]]:
    """The products of grouped rows that an If replaces, and for how many rows at most it copies matrices."""
    chosen: dict[ir.Node, tuple[RowGroups, int]] = {}
    for node in graph if graph.opset_imports.get("", 1) >= OPSET else ():
        groups = find_row_groups(node)
        shape = None if groups is None else matrices_shape(groups)
        dtype = described(node.outputs[0]).dtype
        if groups is not None and shape is not None and dtype is not None:
            most = most_copied(shape[1] * shape[2], dtype.bitwidth)
            if most:
                chosen[node] = groups, most
    return chosen


def inside_copied(graph: ir.Graph) -> set[ir.Value]:
    """The values that are gone once such Ifs are in place. Their sizes depend on how many rows a group has.

    So are those inside products that one operator will compute.
    """
    return inside(groups for groups, _ in find_copied(graph).values()) | inside_experts(graph)


def _choose(node: ir.Node, groups: RowGroups, most: int, editor: Editor) -> None:
    """Replace a product of grouped rows by an If, which copies matrices for up to this many rows."""
    name = node.outputs[0].name or ""
    outside, few, many = (Nodes(f"{name}/{part}", editor) for part in ("size", "few_rows", "many_rows"))
    size, count = count_rows(groups.rows, outside)
    is_few = outside.one("Less", count, outside.number(most + 1))
    # ONNX Runtime would fold a Split of weights inside a branch, and hold a copy of all matrices in each session.
    one = outside.sizes("Clip", size, outside.number(1), outside.number(1))
    ones = outside.sizes("Expand", one, editor.numbers(groups.count), count=groups.count)
    branches = {
        "then_branch": few.graph([_copying(groups, count, few)], node.outputs),
        "else_branch": many.graph([_by_groups(groups, ones, many)], node.outputs),
    }
    made = ir.node("If", [is_few], branches, num_outputs=1, name=node.name)
    made.meta[FEW_ROWS] = "then_branch"
    put_in_place(node, [*outside.made, made], made.outputs)


def count_rows(rows: ir.Value, b: Nodes) -> tuple[ir.Value, ir.Value]:
    """The number of rows of a matrix, as a list and as a scalar."""
    size = b.sizes("Gather", b.sizes("Shape", rows, count=2), b.editor.numbers(0))
    count = b.one("Squeeze", size, b.editor.numbers(0))
    count.type, count.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([])
    return size, count


def row_numbers(count: ir.Value, b: Nodes) -> ir.Value:
    """The numbers of so many rows, [rows, 1]."""
    return b.shaped(b.one("Range", b.number(0), count, b.number(1)), -1, 1)


def _copying(groups: RowGroups, count: ir.Value, b: Nodes) -> ir.Value:
    """The products of rows with copies of their groups' matrices, [rows, columns]. `count` is the number of rows."""
    first, last = b.editor.numbers(0), b.editor.numbers(-1)
    numbers = row_numbers(count, b)
    # A row's group is the number of groups that end before it. All rows beyond the last but one are the last one's.
    ends = b.cut(groups.ends, 0, first, last)
    before = b.one("Cast", b.one("Not", b.one("Less", numbers, ends)), to=ir.DataType.FLOAT)
    own = b.one("Cast", b.one("ReduceSum", before, b.editor.numbers(1), keepdims=0), to=ir.DataType.INT64)
    rows = b.one("Unsqueeze", groups.rows, b.editor.numbers(1))
    made = b.one("Squeeze", b.one("MatMul", rows, b.one("Gather", groups.matrices, own)), b.editor.numbers(1))
    return made if groups.biases is None else b.one("Add", made, b.one("Gather", groups.biases, own))


def _by_groups(groups: RowGroups, ones: ir.Value, b: Nodes) -> ir.Value:
    """The products of each group's rows. `ones` are the lengths of parts of stacked matrices.

    One Split divides all rows, so that the CPU waits once for their numbers, and not for each group's, as in the model.
    """
    first, last = b.editor.numbers(0), b.editor.numbers(-1)
    before = b.one("Concat", first, b.cut(groups.ends, 0, first, last), axis=0)
    counts = b.one("Sub", groups.ends, before)
    parts = _parts(groups.rows, counts, groups, b)
    made = [b.one("MatMul", *pair) for pair in zip(parts, _matrices(groups.matrices, ones, groups, b), strict=True)]
    if groups.biases is not None:
        biases = _matrices(groups.biases, ones, groups, b)
        made = [b.one("Add", *pair) for pair in zip(made, biases, strict=True)]
    return b.one("Concat", *made, axis=0)


def _parts(value: ir.Value, lengths: ir.Value, groups: RowGroups, b: Nodes) -> Sequence[ir.Value]:
    """A value's part for each group, of these lengths along the first axis."""
    made = b.add("Split", [value, lengths], groups.count, attributes=[ir.AttrInt64("axis", 0)])
    b.made[-1].meta[FEW_ROWS] = "else_branch"
    return made


def _matrices(stacked: ir.Value, ones: ir.Value, groups: RowGroups, b: Nodes) -> list[ir.Value]:
    """Each group's matrix, or its bias."""
    return [b.one("Squeeze", part, b.editor.numbers(0)) for part in _parts(stacked, ones, groups, b)]
