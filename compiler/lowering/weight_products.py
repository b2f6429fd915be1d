"""Reads products of a value and a weight matrix that nothing else reads, in engines for GPUs."""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.frontend.matching import is_own, tensor_of

PRODUCTS = {("", "MatMul"), ("com.microsoft", "FusedMatMul")}


def is_product(node: ir.Node) -> bool:
    """Whether a node is a matrix product."""
    return (node.domain, node.op_type) in PRODUCTS


def has_own_weight(product: ir.Node) -> bool:
    """Whether a product multiplies by a matrix that nothing else reads."""
    weight = product.inputs[1]
    return (
        weight is not None
        and not weight.is_graph_input()
        and is_own(weight, 2)
        and not product.attributes.get_int("transA", 0)
    )


def weight_of(product: ir.Node) -> tuple[ir.Value, ir.TensorProtocol]:
    """A product's weight, and its tensor."""
    weight = product.inputs[1]
    assert weight is not None
    return weight, tensor_of(weight)


def columns_of(product: ir.Node) -> int:
    """The weight's axis of output features (columns of the result). The other axis is summed over."""
    return 0 if product.attributes.get_int("transB", 0) else 1
