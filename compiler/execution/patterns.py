"""Patterns of nodes that ONNX Runtime fuses to one: activations, products and norms.

Activations are Gelus, with the bias before them, and x sigmoid(x), QuickGelu. Products are fused with nodes before or
after them, and norms with the residual addition before them. Norms without a kernel are expanded to the nodes of their
function.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from splitc.compiler.execution.liveness import Alike, Nodes, Reads, Size
from splitc.compiler.fusion.gelu import find_by_erf, find_by_tanh
from splitc.compiler.graphs.matching import input_orders, is_onnx, made_by, value_before
from splitc.compiler.graphs.walks import ancestors, producer_of
from splitc.compiler.nodes import inputs_of
from splitc.compiler.patterns.operand import factor_of

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
    return [value for value in inputs_of(node) if value is not data]


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
        ends = inputs_of(maker)
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
    return nodes.without(inner, {node: [gelus[node]] for node in written}), gelus


def find_silus(nodes: Nodes) -> tuple[Nodes, set[ir.Node]]:
    """The nodes with one for each x sigmoid(x) or x sigmoid(a x), and these.

    The values between have no other readers (QuickGeluFusion, core/optimizer/quick_gelu_fusion.cc). In half precision
    on CPUs, casts between the nodes prevent it.
    """
    silus = set[ir.Node]()
    between = set[ir.Value]()
    for node in nodes.order:
        if is_onnx(node, "Mul") and node.outputs[0].dtype == ir.DataType.FLOAT:
            for gate, data in input_orders(node):
                inner = _gates(gate, data)
                if data is not None and inner and all(map(nodes.only_reader, inner)):
                    silus.add(node)
                    between.update(inner)
                    break
    own = {node: [value for value in nodes.reads(node) if value not in between] for node in silus}
    return nodes.without(set(map(producer_of, between)), own), silus


def _gates(gate: ir.Value | None, data: ir.Value | None) -> list[ir.Value]:
    """The values from x to sigmoid(x) or sigmoid(a x), the last one included; none for any other pattern."""
    inner = value_before(gate, "Sigmoid")
    if gate is None or inner is None:
        return []
    if inner is data:
        return [gate]
    scaling = factor_of(made_by(inner, "Mul"))
    return [inner, gate] if scaling is not None and scaling[0] is data else []


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


DOMAIN = "splitc.step"


def find_normed_sums(nodes: Nodes, alike: Alike) -> tuple[Nodes, frozenset[ir.Node]]:
    """The nodes with one for each norm and its addition, and these norms.

    The sum has no other reader, and both summands have three axes and the same shape (SkipLayerNormFusion,
    core/optimizer/skip_layer_norm_fusion.cc).
    """
    there = set(nodes.order)
    additions: dict[ir.Node, ir.Node] = {}
    for node in nodes.order:
        total = node.inputs[0] if is_onnx(node, "LayerNormalization") else None
        maker = made_by(total, "Add")
        if total is None or maker is None or maker not in there:
            continue
        one, other = maker.inputs
        if one is None or other is None or nodes.only_reader(total) is None:
            continue
        if one.shape is not None and len(one.shape) == 3 and alike(one, other):
            additions[node] = maker
    own = {
        norm: [*nodes.reads(addition), *(value for value in nodes.reads(norm) if value is not norm.inputs[0])]
        for norm, addition in additions.items()
    }
    return nodes.without(set(additions.values()), own), frozenset(additions)


@dataclass(frozen=True)
class Inlined:
    """The nodes with the inlined ones, the values that each reads, and the bytes of the new values."""

    nodes: Sequence[ir.Node]
    reads: Reads
    bytes: Mapping[ir.Value, int]


def inline(nodes: Sequence[ir.Node], reads: Reads, size: Size) -> Inlined:
    """Insert the nodes of GroupNormalization before it; it stands for the last of them.

    They cast, center and square the image, divide what is centered, cast it back, and scale it (the operator's function
    in onnx/defs/nn/defs.cc). The cast image lives until the quotient is reshaped.
    """
    if not any(is_onnx(node, "GroupNormalization") for node in nodes):
        return Inlined(nodes, reads, {})
    inlined, own, bytes_ = list[ir.Node](), dict[ir.Node, list[ir.Value]](), dict[ir.Value, int]()

    def step(name: str, size: int, *read: ir.Value) -> ir.Value:
        node = ir.Node(DOMAIN, name, (), [ir.AttrInt64("number", len(own))], num_outputs=1)
        own[node], bytes_[node.outputs[0]] = list(read), size
        inlined.append(node)
        return node.outputs[0]

    for node in nodes:
        if is_onnx(node, "GroupNormalization"):
            given, image = list(reads(node)), size(node.outputs[0])
            cast = step("Cast", image, given[0])
            centered = step("Sub", image, cast)
            deviation = step("ReduceMean", 1, step("Mul", image, cast))
            quotient = step("Div", image, centered, deviation, cast)
            own[node] = [step("Mul", image, step("Cast", image, quotient)), *given[1:]]
        inlined.append(node)
    return Inlined(inlined, lambda node: own[node] if node in own else reads(node), bytes_)
