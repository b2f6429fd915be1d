"""Products that ONNX Runtime fuses with nodes before or after them."""

from __future__ import annotations

from collections.abc import Container

import onnx_ir as ir

from splitc.compiler.execution.liveness import Nodes, Reads
from splitc.compiler.frontend.matching import is_onnx, made_by
from splitc.compiler.fusion.operand import factor_of

# The types of products that are scaled in one node; in half precision only on GPUs.
SCALED = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def biased_products(nodes: Nodes) -> dict[ir.Node, ir.Node]:
    """The additions of a bias that ONNX Runtime fuses with the product before them to a Gemm, each with that product.

    The weight is a matrix. A product with a batch is fused only if the file says its sizes (MatMulAddFusion,
    core/optimizer/matmul_add_fusion.cc).
    """
    biased = {}
    for node in nodes.order:
        product, bias = node.inputs if is_onnx(node, "Add") else (None, None)
        if product is not None and product.producer() is None:
            product, bias = bias, product
        maker = made_by(product, "MatMul")
        if product is None or bias is None or maker is None or product not in nodes.reads(node):
            continue
        image, weight = (value.shape if value is not None else None for value in maker.inputs[:2])
        is_alone = nodes.only_reader(product) is node and not product.is_graph_output()
        is_small = bias.shape is not None and bias.producer() is None and len(bias.shape) == 1
        if not is_alone or not is_small or image is None or weight is None or len(weight) != 2:
            continue
        if len(image) == 2 or (len(image) > 2 and image.is_static()):
            biased[node] = maker
    return biased


def scaled_products(nodes: Nodes, biased: Container[ir.Node]) -> tuple[dict[ir.Value, ir.Value], set[ir.Node]]:
    """The results of scalings that are fused into a product, each with the value that replaces it.

    A scaling before a product scales one of its sides, and has no other reader. One after it scales the result
    (MatMulScaleFusion, core/optimizer/matmul_scale_fusion.cc), unless the product has a bias (`biased`). The second
    result are the last nodes of these products.
    """
    made = {value for node in nodes.order for value in node.outputs}
    scaled: dict[ir.Value, ir.Value] = {}
    last = set[ir.Node]()
    for node in nodes.order:
        if not is_onnx(node, "MatMul") or node.outputs[0].dtype not in SCALED:
            continue
        for side in node.inputs:
            if side is None or side not in made or nodes.only_reader(side) is not node:
                continue
            if (data := _scaled_by_number(side.producer(), nodes.reads)) is not None:
                scaled[side] = data
                last.add(node)
        after = None if node in biased else nodes.only_reader(node.outputs[0])
        if after is not None and _scaled_by_number(after, nodes.reads) is node.outputs[0]:
            scaled[after.outputs[0]] = node.outputs[0]
            last.add(after)
    return scaled, last


def _scaled_by_number(node: ir.Node | None, reads: Reads) -> ir.Value | None:
    """The input that a node scales by a number; None for any other node, and for one that ends a pattern."""
    scaling = factor_of(node)
    return scaling[0] if node is not None and scaling is not None and scaling[0] in reads(node) else None
