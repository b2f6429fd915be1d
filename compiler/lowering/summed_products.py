"""Replaces a product of concatenated values by a sum of products, on GPUs in half precision.

[a, b] x [A; B] is a x A + b x B. The Concat reads and writes all columns of a and b. The sum reads two results and
writes one: that is less if the results have few columns, as in blocks that compute attention and the feed-forward layer
in parallel. On an H200 the last product of such a block of FLUX.1-dev takes 0.97 of the time
(tests/benchmarks/fused_attention.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.frontend.matching import made_by
from splitc.compiler.frontend.origins import note_sizes, noted_sizes, planned_shape, take_place
from splitc.compiler.fusion.kernels import ON_GPUS
from splitc.compiler.lowering.weight_products import columns_of, has_own_weight, is_product, weight_of
from splitc.compiler.nodes import settings_of
from splitc.compiler.operators.gpu_kernels import HALVES
from splitc.compiler.request.shapes import Shape


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
    parts = [part for part in joined.inputs if part is not None]
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
