"""Activations that ONNX Runtime fuses to one node: Gelus, with the bias before them, and x sigmoid(x), QuickGelu."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import partial

import onnx_ir as ir

from splitc.compiler.execution.liveness import Nodes
from splitc.compiler.frontend.matching import is_onnx, made_by, value_before
from splitc.compiler.frontend.walks import ancestors, producer_of
from splitc.compiler.fusion.gelu import find_by_erf, find_by_tanh
from splitc.compiler.fusion.operand import factor_of

GELUS = ("Gelu", "FastGelu")


def written_gelus(nodes: Sequence[ir.Node]) -> dict[ir.Node, tuple[ir.Value, set[ir.Node]]]:
    """The last nodes of Gelus that ONNX Runtime fuses, each with its input and the other nodes of the pattern.

    GeluFusion (core/optimizer/gelu_fusion.cc) knows the forms that divide and do not multiply by a half in between.
    FastGeluFusion (core/optimizer/fast_gelu_fusion.cc) knows those by Tanh. In half precision on CPUs, casts between
    the nodes prevent both.
    """
    there, written = set(nodes), {}
    for data, result in filter(None, (find_by_erf(node) or find_by_tanh(node) for node in nodes)):
        last = producer_of(result)
        parts = ancestors([last], partial(_other_inputs, data))
        is_known = any(node.op_type in ("Div", "Tanh") for node in parts) and data not in last.inputs
        if is_known and data.dtype == ir.DataType.FLOAT and parts <= there:
            written[last] = data, parts - {last}
    return written


def _other_inputs(data: ir.Value, node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None and value is not data]


def biased_gelus(
    gelus: Mapping[ir.Node, ir.Value], nodes: Nodes, products: Container[ir.Node]
) -> dict[ir.Node, ir.Value]:
    """The Gelus that are fused with the bias before them, each with the bias's other summand. `gelus` are by input.

    The kernel allocates a copy of its input, with the bias (BiasGelu<T>::Compute, contrib_ops/cpu/bert/bias_gelu.cc). A
    bias that is already fused into one of `products` is not fused again.
    """
    made = set(nodes.order)
    biased = {}
    for node, added in gelus.items():
        maker = made_by(added, "Add")
        if maker is None or maker not in made or maker in products:
            continue
        # Exporters leave out shapes that ONNX Runtime infers: only the bias, which is stored, has to have one.
        ends = [value for value in maker.inputs if value is not None]
        biases = [value for value in ends if value.producer() is None and len(value.shape or ()) == 1]
        is_alone = nodes.only_reader(added) is not None and not added.is_graph_output()
        if is_alone and len(ends) == 2 and len(biases) == 1:
            biased[node] = next(value for value in ends if value is not biases[0])
    return biased


def find_gelus(nodes: Nodes, came: Mapping[ir.Value, ir.Value]) -> tuple[Nodes, dict[ir.Node, ir.Value]]:
    """The nodes with one for each Gelu, and the inputs of Gelus. `came` are replacements that communication makes."""
    written = written_gelus(nodes.order)
    gelus = {node: came.get(data, data) for node, (data, _) in written.items()}
    inner = {node for _, before in written.values() for node in before}
    for node in nodes.order:
        if node.op_type in GELUS and len(node.inputs) == 1 and node.inputs[0] is not None:
            gelus[node] = came.get(node.inputs[0], node.inputs[0])
    return nodes.without(inner, lambda node: [gelus[node]] if node in written else nodes.reads(node)), gelus


def find_silus(nodes: Nodes) -> tuple[Nodes, set[ir.Node]]:
    """The nodes with one for each x sigmoid(x) or x sigmoid(a x), and these.

    The values between have no other readers (QuickGeluFusion, core/optimizer/quick_gelu_fusion.cc). In half precision
    on CPUs, casts between the nodes prevent it.
    """
    silus = set[ir.Node]()
    between = set[ir.Value]()
    for node in nodes.order:
        if is_onnx(node, "Mul") and node.outputs[0].dtype == ir.DataType.FLOAT:
            for gate, data in (node.inputs, node.inputs[::-1]):
                inner = _gates(gate, data)
                if data is not None and inner and all(map(nodes.only_reader, inner)):
                    silus.add(node)
                    between.update(inner)
                    break

    def read(node: ir.Node) -> list[ir.Value]:
        return [value for value in nodes.reads(node) if value not in between]

    return nodes.without({producer_of(value) for value in between}, read), silus


def _gates(gate: ir.Value | None, data: ir.Value | None) -> list[ir.Value]:
    """The values from x to sigmoid(x) or sigmoid(a x), the last one included; none for any other pattern."""
    inner = value_before(gate, "Sigmoid")
    if gate is None or inner is None:
        return []
    if inner is data:
        return [gate]
    scaling = factor_of(made_by(inner, "Mul"))
    return [inner, gate] if scaling is not None and scaling[0] is data else []
