"""Multiplies parts by parts of a weight, and adds, instead of joining the parts first, on GPUs in half precision.

A Concat before a product reads and writes all of its columns. A sum reads two results and writes one, which is less
where the product has few columns, as after the attention and the feed-forward layer of a block that computes both at
once. On an H200 the last product of such a block of FLUX.1-dev takes 0.97 of the time
(tests/benchmarks/fused_attention.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.frontend.lazy_tensors import CutTensor
from splitc.compiler.frontend.matching import is_onnx, is_own, made_by, only_user, tensor_of
from splitc.compiler.frontend.origins import note_sizes, noted_sizes, planned_shape, take_place
from splitc.compiler.fusion.kernels import ON_GPUS
from splitc.compiler.request.shapes import Shape


def sum_products(graph: ir.Graph, shapes: Mapping[str, Shape]) -> None:
    """Replace products of joined columns by sums of products where that moves fewer bytes, in place.

    `shapes` are those of the model's values. Nodes that have no reader afterwards stay.
    """
    editor = Editor(graph)
    for node in list(graph):
        if parts := _parts(node, shapes):
            _write(node, parts, editor)


def _parts(product: ir.Node, shapes: Mapping[str, Shape]) -> Sequence[tuple[ir.Value, int]]:
    """The values whose columns are joined before a product, with their numbers; none unless a sum moves fewer bytes."""
    if not is_onnx(product, "MatMul"):
        return ()
    data, weight = product.inputs
    joined = made_by(data, "Concat")
    if data is None or joined is None or only_user(data, "MatMul") is not product:
        return ()
    if weight is None or not is_own(weight, 2) or weight.dtype != ir.DataType.FLOAT16:
        return ()
    parts = [part for part in joined.inputs if part is not None]
    sizes = [planned_shape(part, shapes) for part in parts]
    rank, *others = {len(size) for size in sizes}
    if others or not rank or joined.attributes.get_int("axis", 0) not in (-1, rank - 1):
        return ()
    rows, (joint, columns) = math.prod(sizes[0][:-1]), tensor_of(weight).shape.numpy()
    # On this rank all columns are joined: where they are sharded, the weight has fewer rows.
    widths = [size[-1] for size in sizes]
    moves_less = 3 * columns * (len(parts) - 1) < 2 * joint
    fits = joint == sum(widths) and moves_less and rows >= ON_GPUS.least_rows
    return list(zip(parts, widths, strict=True)) if fits else ()


def _write(product: ir.Node, parts: Sequence[tuple[ir.Value, int]], editor: Editor) -> None:
    weight = product.inputs[1]
    assert weight is not None
    columns, total, end = tensor_of(weight).shape.numpy()[1], None, 0
    for part, width in parts:
        start, end = end, end + width
        name = f"{weight.name}[{start}:{end}]"
        rows = CutTensor(tensor_of(weight), {0: slice(start, end)}, ir.Shape([width, columns]), name)
        made = editor.before(product, "MatMul", part, editor.weight(rows))
        total = made if total is None else editor.before(product, "Add", total, made)
        for value in (made, total):  # later passes fuse values of known sizes
            note_sizes(value, noted_sizes(product.outputs[0]))
    assert total is not None
    take_place(total, product.outputs[0])
