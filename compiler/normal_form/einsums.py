"""Writes an Einsum with a weight matrix as the MatMul that it is, as JAX's exporter and models of einops write layers.

Passes that look for layers know MatMul: row mode, adapters, fused operators.
"""

from __future__ import annotations

import re

import onnx_ir as ir

from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.matching import is_onnx
from splitc.compiler.nodes import known_weight


def multiply_by_matrices(graph: ir.Graph) -> None:
    """Replace each Einsum whose last axis of data is multiplied by a weight matrix, in place."""
    editor = Editor(graph)
    for node in [node for node in graph if is_onnx(node, "Einsum")]:
        factors = _factors(node)
        if factors is None:
            continue
        data, weight, is_transposed = factors
        if is_transposed:
            weight = editor.before(node, "Transpose", weight, dtype=weight.dtype, perm=[1, 0])
        editor.replace(node, ir.node("MatMul", [data, weight], name=node.name))


def _factors(node: ir.Node) -> tuple[ir.Value, ir.Value, bool] | None:
    """The data and the matrix of an Einsum that is their product, and whether that matrix is transposed; else None."""
    terms, arrow, made = node.attributes.get_string("equation", "").replace(" ", "").partition("->")
    labels = [re.findall(r"\.\.\.|\w", term) for term in (*terms.split(","), made)]
    if not arrow or len(labels) != 3 or any(len(set(term)) < len(term) for term in labels):
        return None
    for place in (1, 0):
        data, weight = node.inputs[1 - place], node.inputs[place]
        *rows, inner = labels[1 - place] or [""]
        columns = [label for label in labels[place] if label != inner]
        if data is None or weight is None or not _is_matrix(weight) or len(columns) != 1 or len(labels[place]) != 2:
            continue
        if labels[2] == [*rows, *columns] and columns[0] not in rows and "..." not in (*columns, inner):
            return data, weight, labels[place] != [inner, *columns]
    return None


def _is_matrix(value: ir.Value) -> bool:
    """Whether a value is a weight of two axes that requests can't override."""
    tensor = known_weight(value)
    return tensor is not None and len(tensor.shape) == 2
