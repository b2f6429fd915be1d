"""Fuses a norm with the residual addition before it, on GPUs.

On an H100 in half precision LayerNorm with its addition is 1.7 to 2.1 times as fast, and RMSNorm 1.3 to 1.7 times
(tests/benchmarks/fused_attention.py). On a CPU core the fused LayerNorm takes two to five times as long, so CPU devices
keep both nodes.

Norms are fused in each engine's graph, after the model was cut into stages: the fused operator has two outputs, so that
two values would cross a cut between blocks instead of one.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx
import onnx_ir as ir
from onnx.helper import make_node

from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.matching import input_orders, is_onnx, made_by
from splitc.compiler.graphs.origins import described, take_place
from splitc.compiler.graphs.walks import producers, reached
from splitc.compiler.inference.shapes import numbers_or_names
from splitc.compiler.nodes import MICROSOFT
from splitc.compiler.operators.gpu_kernels import HALVES
from splitc.compiler.patterns.kernels import SINGLES

OPERATORS = {
    "LayerNormalization": "SkipLayerNormalization",
    "SimplifiedLayerNormalization": "SkipSimplifiedLayerNormalization",
    "RMSNormalization": "SkipSimplifiedLayerNormalization",
}
_NORMS = {OPERATORS[kind]: kind for kind in ("LayerNormalization", "SimplifiedLayerNormalization")}
# The longest rows that the operator's kernel supports: kMaxSize in skip_layer_norm_impl.cu of ONNX Runtime.
LONGEST = 8192
# The operator's number of outputs, and the index of the sum among them.
OUTPUTS, SUM = 4, 3


@dataclass(frozen=True)
class _Addition:
    """The input of a norm: `first` + `second`, and a `bias` if there is one. `node` is the Add."""

    node: ir.Node
    first: ir.Value
    second: ir.Value
    bias: ir.Value | None = None


def fuse_skips(graph: ir.Graph) -> None:
    """Replace each norm of a sum in half or single precision, and the Add, by one operator, in place.

    An Add of a bias before them is included: it stays in the graph without readers.
    """
    editor = Editor(graph)
    for norm in list(graph):
        addition = _find_addition(norm)
        if addition is not None:
            _write(norm, addition, editor)
    # The operator stands in the place of the addition, and its scale may be computed later.
    graph.sort()


def decompose(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The additions and the norm that a fused node computes, as separate nodes; any other node as it is."""
    kind = _NORMS.get(node.op_type) if node.domain == MICROSOFT else None
    if kind is None:
        return [node]
    first, second, scale, *rest = node.input
    shift, bias = (*rest, "", "")[:2] if kind == "LayerNormalization" else ("", (*rest, "")[0])
    normal, total = node.output[0], (*node.output, "", "", "")[SUM] or f"{node.output[0]}/sum"
    parts = []
    if bias:
        parts.append(make_node("Add", [first, bias], [f"{normal}/biased"]))
        first = f"{normal}/biased"
    epsilon = {attribute.name: attribute.f for attribute in node.attribute}.get("epsilon", 1e-5)
    weights = [scale, shift] if shift else [scale]
    parts.append(make_node("Add", [first, second], [total]))
    return [*parts, make_node(kind, [total, *weights], [normal], axis=-1, epsilon=epsilon)]


def _find_addition(norm: ir.Node) -> _Addition | None:
    """The addition before a norm; None if the fused operator does not support it."""
    total = norm.inputs[0] if norm.inputs else None
    if not is_onnx(norm, *OPERATORS) or total is None or any(value.uses() for value in norm.outputs[1:]):
        return None
    node, shape = made_by(total, "Add"), known_shape(total)
    weights = [known_shape(value) for value in norm.inputs[1:] if value is not None]
    if node is None or shape is None or not weights:
        return None
    if described(total).dtype not in HALVES | SINGLES or len(shape) not in (2, 3):
        return None
    if not isinstance(shape[-1], int) or not 0 < shape[-1] <= LONGEST:
        return None
    if norm.attributes.get_int("axis", -1) not in (-1, len(shape) - 1) or any(own != shape[-1:] for own in weights):
        return None
    first, second = node.inputs
    if first is None or second is None or first is second or not known_shape(first) == known_shape(second) == shape:
        return None
    # The operator takes the place of the addition: its scale can't be computed from the sum.
    if node in reached(producers(norm.inputs[1:]), lambda one: producers(one.inputs)):
        return None
    return _with_bias(_Addition(node, first, second))


def known_shape(value: ir.Value) -> tuple[int | str, ...] | None:
    """A value's sizes, as numbers or symbols; None unless all are known."""
    own = described(value)
    return numbers_or_names(own.shape if own.const_value is None else own.const_value.shape)


def _with_bias(addition: _Addition) -> _Addition:
    """The addition; if an Add of a bias makes one of its inputs, with that Add's data and bias instead."""
    for one, other in ((addition.first, addition.second), (addition.second, addition.first)):
        node = made_by(one, "Add")
        if node is None or len(one.uses()) > 1 or one.is_graph_output():
            continue
        shape = known_shape(one) or ()
        for data, bias in input_orders(node):
            is_bias = bias is not None and bias.is_initializer() and known_shape(bias) == shape[-1:]
            if data is not None and is_bias and known_shape(data) == shape:
                return _Addition(addition.node, data, other, bias)
    return addition


def _write(norm: ir.Node, addition: _Addition, editor: Editor) -> None:
    """Insert the operator where the addition is, since nodes between it and the norm may read the sum."""
    total = addition.node.outputs[0]
    _, scale, *shift = norm.inputs
    weights = [scale, *(shift or [None])] if norm.op_type == "LayerNormalization" else [scale]
    made = ir.node(
        OPERATORS[norm.op_type],
        [addition.first, addition.second, *weights, *([] if addition.bias is None else [addition.bias])],
        {"epsilon": norm.attributes.get_float("epsilon", 1e-5)},
        domain=MICROSOFT,
        num_outputs=OUTPUTS,
        name=norm.name,
    )
    editor.graph.opset_imports.setdefault(MICROSOFT, 1)
    editor.graph.insert_before(addition.node, made)
    for old, new in ((norm.outputs[0], made.outputs[0]), (total, made.outputs[SUM])):
        take_place(new, old)
    for value in made.outputs[1:SUM]:
        value.name = ""
    # At once: the search for the next addition asks whether values have other readers.
    for node in (norm, addition.node):
        editor.graph.remove(node, safe=True)
