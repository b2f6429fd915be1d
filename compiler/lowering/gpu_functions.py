"""Functions that stand for operators which ONNX Runtime has on GPUs only (runtime/engines/onnx_session.py).

Their bodies are what the operators compute in half precision (ContribOperators.md of ONNX Runtime), so that engines for
GPUs run on CPU devices too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import onnx
import onnx.parser
import onnx_ir as ir

from splitc.compiler.frontend.editor import Editor
from splitc.compiler.lowering.fused_functions import DOMAIN as FUSED
from splitc.compiler.lowering.fused_functions import function_of, kernel_of
from splitc.runtime.engines.onnx_session import FUNCTIONS

# The first half of the columns, times Gelu of the second.
BIAS_SPLIT_GELU = """
BiasSplitGelu (X, bias) => (Y) {
    biased = Add (X, bias)
    single = Cast <to = 1> (biased)
    shape = Constant <value_ints = [0, 0, 2, -1]> ()
    halves = Reshape (single, shape)
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    left = Gather <axis = 2> (halves, zero)
    right = Gather <axis = 2> (halves, one)
    root = Constant <value_float = 1.4142135> ()
    scaled = Div (right, root)
    erf = Erf (scaled)
    unit = Constant <value_float = 1.0> ()
    more = Add (erf, unit)
    half = Constant <value_float = 0.5> ()
    halved = Mul (right, half)
    gate = Mul (halved, more)
    product = Mul (left, gate)
    Y = Cast <to = 10> (product)
}
"""
# Of [n, h, w, c], with an activation x sigmoid(x) if that attribute is 1.
GROUP_NORM = """
GroupNorm <activation, epsilon, groups> (X, gamma, beta) => (Y) {
    single = Cast <to = 1> (X)
    first = Transpose <perm = [0, 3, 1, 2]> (single)
    shape = Shape (first)
    same = Constant <value_ints = [0]> ()
    rest = Constant <value_ints = [-1]> ()
    number = Constant <value_int : int = @groups> ()
    groups = Reshape (number, rest)
    grouped_shape = Concat <axis = 0> (same, groups, rest)
    grouped = Reshape (first, grouped_shape)
    ones = ConstantOfShape <value = float[1] {1.0}> (groups)
    zeros = ConstantOfShape <value = float[1] {0.0}> (groups)
    normal = InstanceNormalization <epsilon : float = @epsilon> (grouped, ones, zeros)
    whole = Reshape (normal, shape)
    last = Transpose <perm = [0, 2, 3, 1]> (whole)
    scaled = Mul (last, gamma)
    shifted = Add (scaled, beta)
    activates = Constant <value_int : int = @activation> ()
    weight = Cast <to = 1> (activates)
    gate = Sigmoid (shifted)
    unit = Constant <value_float = 1.0> ()
    less = Sub (gate, unit)
    part = Mul (less, weight)
    factor = Add (part, unit)
    product = Mul (shifted, factor)
    Y = Cast <to = 10> (product)
}
"""
# Of [n, h, w, c], with weights [m, h, w, c].
NHWC_CONV = """
NhwcConv <dilations, group, kernel_shape, pads, strides> (X, W) => (Y) {
    first = Transpose <perm = [0, 3, 1, 2]> (X)
    weight = Transpose <perm = [0, 3, 1, 2]> (W)
    result = Conv <dilations : ints = @dilations, group : int = @group, kernel_shape : ints = @kernel_shape,
                   pads : ints = @pads, strides : ints = @strides> (first, weight)
    Y = Transpose <perm = [0, 2, 3, 1]> (result)
}
"""
BODIES = {"BiasSplitGelu": BIAS_SPLIT_GELU, "GroupNorm": GROUP_NORM, "NhwcConv": NHWC_CONV}
# The opset from which on all of their operators exist as they are used here.
OPSET = 13


def call(editor: Editor, before: ir.Node, name: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
    """Insert a call of one of the functions right before a node. Returns its result."""
    editor.graph.opset_imports.setdefault(FUNCTIONS, 1)
    return editor.before(before, name, *inputs, domain=FUNCTIONS, **attributes)


def functions_of(graph: ir.Graph) -> list[ir.Function]:
    """The functions that a graph's nodes call."""
    nodes = [ir.to_proto(node) for node in graph if node.domain in (FUNCTIONS, FUSED)]
    return [ir.from_proto(proto) for proto in written_functions(nodes, graph.opset_imports.get("", OPSET))]


def written_functions(nodes: Iterable[onnx.NodeProto], opset: int) -> list[onnx.FunctionProto]:
    """The functions that some nodes call, for this opset."""
    head = f'<domain: "{FUNCTIONS}", opset_import: ["" : {opset}]>'
    made: dict[str, onnx.FunctionProto] = {}
    for node in nodes:
        if node.domain == FUNCTIONS and node.op_type not in made:
            made[node.op_type] = onnx.parser.parse_function(head + BODIES[node.op_type])
        elif node.domain == FUSED and node.op_type not in made:
            made[node.op_type] = function_of(kernel_of(node), opset)
    return list(made.values())
