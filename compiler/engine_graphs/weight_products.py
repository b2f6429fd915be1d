"""Two rewrites of products with a weight matrix that nothing else reads, in engines for GPUs.

Query, key and value projections of attention with a cache are merged into one product and a Split. For a single token
they are small: the key and value weights of an 8B decoder are 8 MiB each, which a GPU reads in little more than the
time of a launch. On an H100 in half precision a token of such a decoder takes 1.05 times as long with three products.

A product of concatenated values becomes a sum of products in half precision: [a, b] x [A; B] is a x A + b x B. The
Concat reads and writes all columns of a and b. The sum reads two results and writes one: that is less if the results
have few columns, as in blocks that compute attention and the feed-forward layer in parallel. On an H200 the last
product of such a block of FLUX.1-dev takes 0.97 of the time (tests/benchmarks/fused_attention.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from splitc.compiler.caches.grouped import PASTS
from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.lazy_tensors import JoinedTensor
from splitc.compiler.graphs.matching import is_own, made_by, tensor_of
from splitc.compiler.graphs.node_key import node_key
from splitc.compiler.graphs.origins import note_sizes, noted_sizes, planned_shape, take_place
from splitc.compiler.graphs.walks import producers, reached
from splitc.compiler.nodes import inputs_of, operator_name, settings_of
from splitc.compiler.operators.gpu_kernels import GROUPED, HALVES
from splitc.compiler.operators.registry import operator_of
from splitc.compiler.patterns.kernels import ON_GPUS
from splitc.compiler.request.shapes import Shape

PRODUCTS = ("MatMul", "com.microsoft.FusedMatMul")


def is_product(node: ir.Node) -> bool:
    """Whether a node is a matrix product."""
    return operator_name(node) in PRODUCTS


def has_own_weight(product: ir.Node) -> bool:
    """Whether a product multiplies by a matrix that nothing else reads."""
    weight = product.inputs[1]
    return weight is not None and is_own(weight, 2) and not product.attributes.get_int("transA", 0)


def weight_of(product: ir.Node) -> tuple[ir.Value, ir.TensorProtocol]:
    """A product's weight, and its tensor."""
    weight = product.inputs[1]
    assert weight is not None
    return weight, tensor_of(weight)


def columns_of(product: ir.Node) -> int:
    """The weight's axis of output features (columns of the result). The other axis is summed over."""
    return 0 if product.attributes.get_int("transB", 0) else 1


def sum_products(graph: ir.Graph, shapes: Mapping[str, Shape]) -> None:
    """Replace products of concatenated values by sums of products where that moves fewer bytes, in place.

    `shapes` are those of the model's values. Nodes without readers afterwards stay.
    """
    editor = Editor(graph)
    for node in list(graph):
        if parts := _parts(node, shapes):
            _write(node, parts, editor)


def _parts(product: ir.Node, shapes: Mapping[str, Shape]) -> Sequence[tuple[ir.Value, int]]:
    """The values concatenated before a product, with their numbers of columns; none unless a sum moves fewer bytes."""
    if not is_product(product) or not has_own_weight(product):
        return ()
    data, (weight, tensor) = product.inputs[0], weight_of(product)
    joined = made_by(data, "Concat")
    if data is None or joined is None or len(data.uses()) > 1 or data.is_graph_output():
        return ()
    if weight.dtype not in HALVES:
        return ()
    parts = inputs_of(joined)
    sizes = [planned_shape(part, shapes) for part in parts]
    rank, *others = {len(size) for size in sizes}
    if others or not rank or joined.attributes.get_int("axis", 0) not in (-1, rank - 1):
        return ()
    columns = columns_of(product)
    joint, wide = (tensor.shape.numpy()[axis] for axis in (1 - columns, columns))
    # This rank's numbers of columns.
    widths = [width for part in parts if isinstance(width := (noted_sizes(part) or [None])[-1], int)]
    moves_less = 3 * wide * (len(parts) - 1) < 2 * joint
    fits = joint == sum(widths) and moves_less and math.prod(sizes[0][:-1]) >= ON_GPUS.least_rows
    return list(zip(parts, widths, strict=True)) if fits and len(widths) == len(parts) else ()


def _write(product: ir.Node, parts: Sequence[tuple[ir.Value, int]], editor: Editor) -> None:
    (weight, _), along = weight_of(product), 1 - columns_of(product)
    total, end = None, 0
    for part, width in parts:
        start, end = end, end + width
        rows = editor.part_of(weight, along, slice(start, end))
        how = {"domain": product.domain, **settings_of(product)}
        made = editor.before(product, product.op_type, part, rows, **how)
        total = made if total is None else editor.before(product, "Add", total, made)
        for value in (made, total):  # later passes fuse values of known sizes
            note_sizes(value, noted_sizes(product.outputs[0]))
    assert total is not None
    take_place(total, product.outputs[0])


# The inputs of GroupQueryAttention for queries, keys and values, and its first cache.
PARTS, PAST = slice(3), slice(PASTS[0], PASTS[0] + 1)
# ONNX Runtime has a kernel for a Split into three parts of any sizes (Split3Inner). A Split into two has to copy the
# sizes to the GPU.
COUNT = 3


def join_products(graph: ir.Graph) -> None:
    """Merge the query, key and value projections of attention with a cache, if they are of one value, in place."""
    editor = Editor(graph)
    for attention in [node for node in graph if operator_name(node) == GROUPED and any(node.inputs[PAST])]:
        groups: dict[Any, list[ir.Node]] = {}
        products = _products(attention)
        for product in (node for node in graph if node in products):
            groups.setdefault(_kind(product), []).append(product)
        for group in groups.values():
            if len(group) == COUNT:
                _join(group, editor)


def _products(attention: ir.Node) -> set[ir.Node]:
    """The nearest products before an attention's queries, keys and values, if nothing else reads their weights."""
    above = reached(
        producers(attention.inputs[PARTS]),
        lambda node: () if is_product(node) or operator_of(node).reads_shape else producers(node.inputs),
    )
    return {node for node in above if is_product(node) and has_own_weight(node)}


def _kind(product: ir.Node) -> Any:
    """A key that is equal for products that can be merged."""
    _, tensor = weight_of(product)
    return product.inputs[0], node_key(product), tensor.dtype, tensor.shape.numpy()[1 - columns_of(product)]


def _join(products: list[ir.Node], editor: Editor) -> None:
    """Replace the products by one product and a Split, inserted before the first one."""
    first, axis = products[0], columns_of(products[0])
    weights = [weight_of(product) for product in products]
    name = "+".join(weight.name or "" for weight, _ in weights)
    joined = editor.weight(JoinedTensor([tensor for _, tensor in weights], axis, name))
    made = editor.before(first, first.op_type, first.inputs[0], joined, domain=first.domain, **settings_of(first))
    made.name, made.type = f"{first.outputs[0].name}/joined", first.outputs[0].type
    sizes, how = editor.lists("Split", split=[tensor.shape.numpy()[axis] for _, tensor in weights])
    split = ir.node("Split", [made, *sizes], {"axis": -1, **how}, num_outputs=COUNT)
    editor.graph.insert_before(first, split)
    for product, (weight, _), new in zip(products, weights, split.outputs, strict=True):
        take_place(new, product.outputs[0])
        editor.graph.remove(product, safe=True)
        del editor.graph.initializers[weight.name or ""]
