"""Which weights several sessions of ONNX Runtime may share.

A session is given a shared weight under its name, as it is in the file. ONNX Runtime's transpose optimizer may have
rewritten its own weight of that name: where it moves a Transpose through an Add, it transposes the Add's weight in
place. Then the given one takes the place of the transposed one, and the results are wrong. So a weight is shared if
only operators read it that the optimizer moves nothing through.
"""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.operators.registry import operator_of


def is_left_alone(weight: ir.Value) -> bool:
    """Whether ONNX Runtime's optimizers leave a weight as it is: it is multiplied with, looked up in, or a norm's."""
    return all(_keeps_inputs(use.node) for use in weight.uses())


def _keeps_inputs(node: ir.Node) -> bool:
    operator = operator_of(node)
    if operator.dequantizes:
        return all(map(is_left_alone, node.outputs))
    return operator.flops is not None or bool(operator.lookups) or operator.is_norm
