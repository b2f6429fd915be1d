"""The manifest's entry for an engine, from its graph, and the weights that several of its sessions may share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from splitc.compiler.engine_graphs.convolutions import convolves
from splitc.compiler.engine_graphs.cpu_values import decides_by_data, why_not_captured
from splitc.compiler.engine_graphs.few_rows import FEW_ROWS, inside_copied
from splitc.compiler.engine_graphs.gpu_functions import DOMAIN as FUSED
from splitc.compiler.engine_graphs.gpu_functions import kernel_of
from splitc.compiler.engine_graphs.unaligned_bias import adds_unaligned_bias
from splitc.compiler.fusion.experts import OPERATOR as EXPERTS
from splitc.compiler.graphs.origins import described
from splitc.compiler.graphs.reads import has_subgraphs
from splitc.compiler.lowering.communication import communicates
from splitc.compiler.lowering.programs import names
from splitc.compiler.nodes import operator_name
from splitc.compiler.operators.gpu_kernels import REPACKED
from splitc.compiler.operators.registry import operator_of
from splitc.runtime.arrays.onnx_types import KNOWN
from splitc.runtime.engines.onnx_session import FUNCTIONS
from splitc.runtime.gpu.weight_places import PASSED_ON
from splitc.runtime.package import manifest as m
from splitc.runtime.package.fused import Fused
from splitc.runtime.package.products import ITEM_BYTES, Product

# Weights of types that sessions can't share on a GPU are each session's own if they are less than this share of all
# bytes. An example: the booleans that mask a rank's rows of an embedding. A choice: otherwise sessions share nothing.
OWN_SHARE = 0.01
# What multiplies rows with a weight.
PRODUCTS = frozenset({"MatMul", "Gemm", "FusedMatMul"})


def engine_entry(
    path: str, graph: ir.Graph, group: Sequence[int], uncertain: Collection[str], on_gpu: bool
) -> m.EngineFile:
    """The entry of the graph's file, at this path in the package, without its `written_fields`.

    - `group`: the ranks of the graph's collectives, if it has any.
    - `uncertain`: the model's values whose sizes depend on data.
    - `on_gpu`: ONNX Runtime runs it on a GPU.
    """
    return m.EngineFile(
        path,
        names(graph.inputs),
        names(graph.outputs),
        _sizes_only(graph),
        group=list(group) if any(map(communicates, graph)) else [],
        convolves=any(map(convolves, graph.all_nodes())),
        data_sizes=_has_data_sizes(graph, uncertain, on_gpu),
        fused=_fused(graph),
    )


def written_fields(graph: ir.Graph, on_gpu: bool) -> dict[str, Any]:
    """The fields of an engine's entry that depend on the graph as it is written: on its capture, and on its products.

    `on_gpu`: ONNX Runtime runs it on a GPU.
    """
    branches = has_subgraphs(graph)
    by_data = branches and decides_by_data(graph)
    return {
        "attends": any(operator_of(node).is_attention for node in graph.all_nodes()),
        "unaligned_bias": on_gpu and adds_unaligned_bias(graph),
        "experts": on_gpu and any(node.op_type == EXPERTS for node in graph.all_nodes()),
        "control_flow": by_data,
        "branches_by_sizes": branches and not by_data,
        "not_captured": why_not_captured(graph) if on_gpu else "",
        "products": _products(graph) if on_gpu else [],
    }


def _products(graph: ir.Graph) -> list[Product]:
    """The different products with weights whose number of rows the model's file does not fix."""
    made = [_product(node) for node in graph if node.op_type in PRODUCTS]
    return list(dict.fromkeys(product for product in made if product is not None))


def _product(node: ir.Node) -> Product | None:
    """The product of any number of rows with a weight that a node computes; None if it is not one."""
    rows, weight = node.inputs[:2]
    if rows is None or weight is None or weight.const_value is None or node.attributes.get_int("transA", 0) != 0:
        return None
    shape, tensor = described(rows).shape, weight.const_value
    is_fixed = shape is not None and all(isinstance(size, int) for size in shape[:-1])
    if is_fixed or len(tensor.shape) != 2 or (dtype := _type(tensor)) not in ITEM_BYTES:
        return None
    transposed = bool(node.attributes.get_int("transB", 0))
    first, second = tensor.shape.numpy()
    return Product(second, first, dtype, True) if transposed else Product(first, second, dtype)


def _fused(graph: ir.Graph) -> list[Fused]:
    """The kernels of the graph's fused operators."""
    nodes = {node.op_type: node for node in graph if node.domain == FUSED}
    return [kernel_of(ir.to_proto(node)) for node in nodes.values()]


def _has_data_sizes(graph: ir.Graph, uncertain: Collection[str], on_gpu: bool) -> bool:
    """Whether the graph computes any of the model's values whose sizes depend on data.

    On GPUs, those inside products of grouped rows do not count: a captured request has none
    (engine_graphs/few_rows.py).
    """
    inside = inside_copied(graph) if on_gpu else set()
    computed = (value for node in graph.all_nodes() for value in node.outputs if value not in inside)
    return any(described(value).name in uncertain for value in computed)


def _sizes_only(graph: ir.Graph) -> list[str]:
    """The inputs that only Shape and Size read."""
    return [
        value.name or ""
        for value in graph.inputs
        if value.uses() and all(use.node.op_type in ("Shape", "Size") for use in value.uses())
    ]


def shareable_weights(graph: ir.Graph, on_gpu: bool) -> list[m.Weight] | None:
    """The weights in files beside the graph that sessions may share; None if they may share none.

    `on_gpu`: ONNX Runtime runs it on a GPU.
    """
    tensors = {name: value.const_value for name, value in graph.initializers.items()}
    written = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, ir.ExternalTensor)}
    if not are_shareable(written, graph, on_gpu):
        return None
    passed_on = {name: tensor for name, tensor in written.items() if _type(tensor) in PASSED_ON}
    if _are_few(written.keys() - passed_on.keys(), written):
        written = passed_on
    return [
        m.Weight(name, _type(tensor), list(tensor.shape.numpy()), str(tensor.location), tensor.offset or 0)
        for name, tensor in written.items()
        if is_left_alone(graph.initializers[name])
    ]


def are_shareable(weights: Mapping[str, ir.TensorProtocol], graph: ir.Graph, on_gpu: bool) -> bool:
    """Whether the runtime knows the types of a graph's weights, none is an input too, and kernels use them as they are.

    Sessions on a GPU that shared weights of which kernels make copies would hold them twice, or three times.
    """
    if not weights.keys().isdisjoint(names(graph.inputs)) or not set(KNOWN).issuperset(map(_type, weights.values())):
        return False
    return not on_gpu or _are_few(_repacked(graph), weights)


def _are_few(some: Collection[str], weights: Mapping[str, ir.TensorProtocol]) -> bool:
    """Whether some of these weights are none, or less than OWN_SHARE of all bytes."""
    own = sum(weights[name].nbytes for name in some if name in weights)
    return not own or own < OWN_SHARE * sum(tensor.nbytes for tensor in weights.values())


def _repacked(graph: ir.Graph) -> frozenset[str]:
    """The weights of which kernels on GPUs make copies in a layout of their own."""
    pairs = [(node, place) for node in graph.all_nodes() for place in REPACKED.get(operator_name(node), ())]
    read = [node.inputs[place] for node, place in pairs if place < len(node.inputs)]
    return frozenset(value.name or "" for value in read if value is not None)


def _type(tensor: ir.TensorProtocol) -> str:
    return str(tensor.dtype.numpy())


def is_left_alone(weight: ir.Value) -> bool:
    """Whether ONNX Runtime's optimizers never change a weight: only products, lookups, norms and GPU operators read it.

    A shared weight replaces a session's own weight of the same name. The transpose optimizer may have transposed that
    in place, when it moved a Transpose through an Add. The shared weight is as in the file, so results would be wrong.
    """
    return all(_keeps_inputs(use.node) for use in weight.uses())


def _keeps_inputs(node: ir.Node) -> bool:
    if node.domain in (FUNCTIONS, FUSED):
        return True
    if node.op_type == "Split" and FEW_ROWS in node.meta:  # no Transpose is in its branch
        return True
    operator = operator_of(node)
    if operator.dequantizes:
        return all(map(is_left_alone, node.outputs))
    return operator.flops is not None or bool(operator.lookups) or operator.is_norm
