"""Recognizes products of rows with the matrix of each row's group: PyTorch's `_grouped_mm`, as its exporters write it.

Mixtures of experts sort rows by their expert, so that each expert's rows follow each other. Exporters unroll them: for
each expert, a Range from the end of the one before to its own end, a Gather of these rows, and a MatMul; all results
are concatenated. How many rows an expert has depends on data, but all together have as many as there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.nodes import known_tensor
from splitc.compiler.operators.operator import Shapes

# The most rows whose matrices are copied, and the most bytes of the copies. A choice: a token has 2 to 10 experts, with
# matrices of up to 250 MB.
MOST_ROWS, MOST_BYTES = 16, 1 << 29
# This key of a Concat's `meta` says that one operator computes its products, and others, on GPUs (fusion/experts.py).
EXPERTS = "splitc.experts"


@dataclass(frozen=True)
class RowGroups:
    """Products of rows with the matrix of each row's group.

    - `rows`: [rows, inner], sorted by group. `ends`: where each group ends, [groups]. `matrices`: [groups, inner,
      columns]. `biases`: what is added to a group's results, [groups, columns]; None without.
    - `count`: the number of groups.
    - `nodes`: all nodes that compute the result from these.
    """

    rows: ir.Value
    ends: ir.Value
    matrices: ir.Value
    biases: ir.Value | None
    count: int
    nodes: frozenset[ir.Node]


@dataclass(frozen=True)
class _Group:
    """One group: its rows' source, the part of `ends` before it (None for 0) and at its end, matrix and bias."""

    rows: ir.Value
    before: ir.Value | None
    end: ir.Value
    matrix: ir.Value
    bias: ir.Value | None


def find_row_groups(node: ir.Node) -> RowGroups | None:
    """The products whose results a Concat joins; None for any other node."""
    if node.op_type != "Concat" or node.domain or node.attributes.get_int("axis", 1) != 0 or len(node.inputs) < 2:
        return None
    groups = [_read_group(value) for value in node.inputs]
    known = [group for group in groups if group is not None]
    if len(known) < len(groups) or len({group.rows for group in known}) > 1:
        return None
    if [group.before for group in known] != [None, *(group.end for group in known[:-1])]:
        return None
    ends, matrices = _whole([group.end for group in known]), _whole([group.matrix for group in known])
    biases = [group.bias for group in known if group.bias is not None]
    added = _whole(biases) if biases else None
    if ends is None or matrices is None or (biases and (added is None or len(biases) < len(known))):
        return None
    given = {known[0].rows, ends, matrices, added}
    return RowGroups(known[0].rows, ends, matrices, added, len(known), _between(node, given))


def inside(products: Iterable[RowGroups]) -> set[ir.Value]:
    """The values inside these products, which nothing else reads: rows of one group, for example."""
    nodes = {node for groups in products for node in groups.nodes}
    values = (value for node in nodes for value in node.outputs)
    return {value for value in values if all(use.node in nodes for use in value.uses())}


def inside_experts(graph: ir.Graph) -> set[ir.Value]:
    """The values inside products that one operator will compute on GPUs. They are gone then."""
    return inside(groups for node in graph if EXPERTS in node.meta and (groups := find_row_groups(node)) is not None)


def _read_group(made: ir.Value | None) -> _Group | None:
    """The group whose rows a value is computed from; None if it is computed otherwise."""
    bias = None
    if (same := _producer(made, "Identity")) is not None:  # a bias that another rank adds
        made = same.inputs[0]
    if (sum_ := _producer(made, "Add")) is not None:
        made, bias = sum_.inputs[0], _part(sum_.inputs[1])
        if bias is None:
            return None
    product = _producer(made, "MatMul")
    if product is None:
        return None
    gather, matrix = _producer(product.inputs[0], "Gather"), _part(product.inputs[1])
    if gather is None or matrix is None or gather.attributes.get_int("axis", 0) != 0:
        return None
    span = _producer(gather.inputs[1], "Range")
    if span is None or gather.inputs[0] is None or _number(span.inputs[2]) != 1:
        return None
    before, end = _part(span.inputs[0]), _part(span.inputs[1])
    if end is None or (before is None and _number(span.inputs[0]) != 0):
        return None
    return _Group(gather.inputs[0], before, end, matrix, bias)


def _part(value: ir.Value | None) -> ir.Value | None:
    """The output of a Split that a Squeeze makes a value of; None if there is none."""
    squeeze = _producer(value, "Squeeze")
    split = None if squeeze is None else _producer(squeeze.inputs[0], "Split")
    return None if squeeze is None or split is None or split.attributes.get_int("axis", 0) != 0 else squeeze.inputs[0]


def _whole(parts: list[ir.Value]) -> ir.Value | None:
    """The value whose parts of equal length these are, in order; None if they are not all of a Split's outputs."""
    split = parts[0].producer()
    if split is None or list(split.outputs) != parts or len(split.inputs) > 1:
        return None
    return split.inputs[0]


def _number(value: ir.Value | None) -> int | None:
    """The only number of a constant, or of one that a Squeeze makes a scalar."""
    squeeze = _producer(value, "Squeeze")
    value = value if squeeze is None else squeeze.inputs[0]
    tensor = known_tensor(value)
    return int(tensor.numpy().item()) if tensor is not None and tensor.size == 1 else None


def _producer(value: ir.Value | None, operator: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == operator and not node.domain else None


def _between(node: ir.Node, given: set[ir.Value | None]) -> frozenset[ir.Node]:
    """A node and those above it, down from these values."""
    between, left = {node}, [node]
    while left:
        above = {value.producer() for value in left.pop().inputs if value is not None and value not in given}
        new = {maker for maker in above if maker is not None} - between
        between |= new
        left += new
    return frozenset(between)


def most_copied(elements: int, bits: int) -> int:
    """The most rows whose matrices, of so many `elements`, are copied on GPUs (engine_graphs/few_rows.py)."""
    return min(MOST_ROWS, MOST_BYTES // max(1, elements * bits // 8))


def grouped_scratch(node: ir.Node, inputs: Shapes, outputs: Shapes) -> tuple[int, ...]:
    """The scratch of a Concat on GPUs, in elements, if it joins products of grouped rows.

    Either the copied matrices, or the sorted rows of the operator that computes them.
    """
    groups = find_row_groups(node)
    dtype = node.outputs[0].dtype
    shape = None if groups is None else matrices_shape(groups)
    if shape is None or dtype is None:
        return ()
    if EXPERTS in node.meta:
        return (shape[1] * outputs[0][0],)
    elements = shape[1] * outputs[0][-1]
    return (elements * most_copied(elements, dtype.bitwidth),)


def matrices_shape(groups: RowGroups) -> tuple[int, int, int] | None:
    """The shape of the stacked matrices; None if it is not known."""
    tensor = groups.matrices.const_value
    shape = groups.matrices.shape if tensor is None else tensor.shape
    sizes = [size for size in shape or () if isinstance(size, int)]
    return (sizes[0], sizes[1], sizes[2]) if len(sizes) == 3 else None
