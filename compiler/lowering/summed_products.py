"""Multiplies parts by parts of a weight, and adds, instead of joining the parts first, on GPUs in half precision.

A Concat before a product reads and writes all of its columns. A sum reads two results and writes one, which is less
where the product has few columns, as after the attention and the feed-forward layer of a block that computes both at
once. On an H200 the last product of such a block of FLUX.1-dev takes 0.97 of the time
(tests/benchmarks/fused_attention.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import onnx_ir as ir

from splitc.compiler.frontend.cut_tensor import CutTensor
from splitc.compiler.frontend.editor import Editor
from splitc.compiler.frontend.origins import described, take_place
from splitc.compiler.fusion.divided import is_own
from splitc.compiler.fusion.kernels import ON_GPUS
from splitc.compiler.fusion.norm import only_user
from splitc.compiler.nodes import unused_name
from splitc.compiler.request.shapes import Shape


def sum_products(graph: ir.Graph, shapes: Mapping[str, Shape]) -> None:
    """Replace products of joined columns by sums of products where that moves fewer bytes, in place.

    `shapes` are those of the model's values. Nodes that have no reader afterwards stay.
    """
    editor = Editor(graph)
    for node in list(graph):
        parts = _parts(node, shapes)
        if parts:
            _write(node, parts, [shapes[described(part).name or ""][-1] for part in parts], editor)


def _parts(product: ir.Node, shapes: Mapping[str, Shape]) -> Sequence[ir.Value]:
    """The values whose columns are joined before a product, if a sum moves fewer bytes; else none."""
    if product.op_type != "MatMul" or product.domain or None in product.inputs:
        return ()
    data, weight = product.inputs
    joined = None if data is None else data.producer()
    if data is None or joined is None or joined.op_type != "Concat" or only_user(data, "MatMul") is not product:
        return ()
    if weight is None or not is_own(weight, 2) or weight.dtype != ir.DataType.FLOAT16:
        return ()
    parts = [part for part in joined.inputs if part is not None]
    sizes = [shapes.get(described(part).name or "", ()) for part in parts]
    rank = len(sizes[0])
    if rank == 0 or joined.attributes.get_int("axis", 0) not in (-1, rank - 1):
        return ()
    rows, (joint, columns) = math.prod(sizes[0][:-1]), weight.const_value.shape.numpy()  # type: ignore[union-attr]
    # On this rank all columns are joined: where they are sharded, the weight has fewer rows.
    is_whole = joint == sum(size[-1] for size in sizes)
    moves_less = 3 * columns * (len(parts) - 1) < 2 * joint
    return parts if is_whole and moves_less and rows >= ON_GPUS.least_rows else ()


def _write(product: ir.Node, parts: Sequence[ir.Value], widths: Sequence[int], editor: Editor) -> None:
    weight = product.inputs[1]
    assert weight is not None and weight.const_value is not None
    columns, total = weight.const_value.shape.numpy()[1], None
    for part, (start, end) in zip(parts, pairwise(accumulate(widths, initial=0)), strict=True):
        name = unused_name(f"{weight.name}[{start}:{end}]", editor.graph.initializers)
        rows = CutTensor(weight.const_value, {0: slice(start, end)}, ir.Shape([end - start, columns]), name)
        made = editor.before(product, "MatMul", part, editor.add((name, b""), rows))
        total = made if total is None else editor.before(product, "Add", total, made)
    assert total is not None
    take_place(total, product.outputs[0])
