"""Attention that was written as products and a Softmax, found by its structure, whoever wrote it."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from splitc.compiler.fusion.operand import constant, factor_of

# More nodes between a Softmax and its product are not looked through. A choice: an addition is looked through both
# ways, so that the time may double with each. With 3, or 100, the same is fused in 43 models.
DEEPEST = 12


@dataclass(frozen=True)
class Attention:
    """softmax(scale x query x keys + biases) x values.

    `query` and `keys` are the factors of one product, which makes [..., length, all], and `values` the second factor of
    the other one. With `guarded`, rows of NaN, which a mask leaves nothing of, count as zeros.
    """

    query: ir.Value
    keys: ir.Value
    values: ir.Value
    biases: tuple[ir.Value, ...]
    scale: float
    guarded: bool
    output: ir.Value


class NotFusedError(Exception):
    """What looks like attention has no operator of its own. The message says why, without the node."""


@dataclass(frozen=True)
class _Scores:
    """What is done to a product before the Softmax."""

    product: ir.Node
    biases: tuple[ir.Value, ...] = ()
    scale: float = 1.0


def find_attention(softmax: ir.Node, rank: int | None, opset: int) -> Attention | None:
    """The attention around a Softmax; None if nothing is weighed by its output, as in a router or a classifier.

    `rank` is the number of its axes, None if that is unknown. Raises NotFusedError for what is not understood.
    """
    weighing = _find_weighing(softmax.outputs[0])
    if weighing is None:
        return None
    node, guarded = weighing
    scores, values = softmax.inputs[0], node.inputs[1]
    assert scores is not None and values is not None
    # Before opset 13 the default is axis 1, of which a Softmax with the last axis is a special case.
    axis = softmax.attributes.get_int("axis", -1 if opset >= 13 else 1)
    if rank is None or axis not in (-1, rank - 1):
        raise NotFusedError("the Softmax is not known to be over the last axis")
    above = _find_product(scores, DEEPEST)
    query, keys = above.product.inputs
    assert query is not None and keys is not None
    return Attention(query, keys, values, above.biases, above.scale, guarded, node.outputs[0])


def _find_weighing(value: ir.Value) -> tuple[ir.Node, bool] | None:
    """The product whose first factor a Softmax's output is, and whether NaN are made zeros on the way."""
    guarded = False
    while not value.is_graph_output():
        users = dict.fromkeys(node for node, _ in value.uses())
        kinds = {node.op_type: node for node in users if not node.domain}
        if len(users) == 2 and kinds.keys() == {"IsNaN", "Where"} and _guards(kinds["Where"], kinds["IsNaN"], value):
            guarded, value = True, kinds["Where"].outputs[0]
        elif len(users) != 1 or not kinds:
            return None
        elif "MatMul" in kinds:
            first, second = kinds["MatMul"].inputs
            weighs = first is value and second is not None and not second.is_initializer()
            return (kinds["MatMul"], guarded) if weighs else None
        elif kinds.keys() <= {"Cast", "Identity", "Dropout"}:
            value = next(iter(users)).outputs[0]
        else:
            return None
    return None


def _guards(where: ir.Node, is_nan: ir.Node, value: ir.Value) -> bool:
    """Whether a Where makes zeros of a value's NaN."""
    return list(where.inputs[::2]) == [is_nan.outputs[0], value] and constant(where.inputs[1]) == 0.0


def _find_product(value: ir.Value, deepest: int) -> _Scores:
    """The product of two computed values that scores come from, and what is done to it on the way."""
    node = value.producer()
    if node is None or node.domain or not deepest:
        raise NotFusedError("its scores come from no product")
    if node.op_type == "MatMul":
        if any(factor is None or factor.is_initializer() for factor in node.inputs):
            raise NotFusedError("its scores are a product with a weight")
        return _Scores(node)
    if node.op_type in ("Cast", "Identity"):
        (source,) = node.inputs
        assert source is not None
        return _find_product(source, deepest - 1)
    if node.op_type in ("Mul", "Div"):
        return _find_scaled(node, deepest)
    if node.op_type == "Add":
        return _find_biased(node, deepest)
    raise NotFusedError(f"its scores pass a {node.op_type}")


def _find_scaled(node: ir.Node, deepest: int) -> _Scores:
    scaled = factor_of(node)
    if scaled is None:
        raise NotFusedError(f"its scores pass a {node.op_type} by what is no constant number")
    above = _find_product(scaled[0], deepest - 1)
    if above.biases:
        raise NotFusedError("its scores are scaled after a mask was added")
    return _Scores(above.product, (), above.scale * scaled[1])


def _find_biased(node: ir.Node, deepest: int) -> _Scores:
    reasons = []
    for path, bias in (node.inputs, node.inputs[::-1]):
        assert path is not None and bias is not None
        try:
            above = _find_product(path, deepest - 1)
        except NotFusedError as error:
            reasons.append(error)
        else:
            return _Scores(above.product, (*above.biases, bias), above.scale)
    raise reasons[0]
