"""Which weights several sessions of ONNX Runtime may share.

A shared weight replaces a session's own weight of the same name. ONNX Runtime's transpose optimizer may have transposed
the session's own in place, when it moved a Transpose through an Add. The shared weight is as in the file, so results
would be wrong. So a weight is shared only if the optimizer moves nothing through any operator that reads it.
"""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.operators.registry import operator_of
from splitc.runtime.engines.gpu_operators import FUNCTIONS


def is_left_alone(weight: ir.Value) -> bool:
    """Whether ONNX Runtime's optimizers never change a weight.

    Only products, lookups, norms and operators for GPUs read it.
    """
    return all(_keeps_inputs(use.node) for use in weight.uses())


def _keeps_inputs(node: ir.Node) -> bool:
    if node.domain == FUNCTIONS:
        return True
    operator = operator_of(node)
    if operator.dequantizes:
        return all(map(is_left_alone, node.outputs))
    return operator.flops is not None or bool(operator.lookups) or operator.is_norm
