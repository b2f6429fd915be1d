"""Finds linear layers, to whose weights adapters (LoRA) may be added, with the names by which adapters know them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from splitc.compiler.graphs.matching import is_onnx
from splitc.compiler.inference.shapes import shape_of
from splitc.compiler.nodes import MICROSOFT, known_weight
from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.operators.registry import operator_of
from splitc.runtime.adapters.matching import Layer

QUANTIZED = "its weight is quantized: --lora-slots adds adapters beside it"
# The metadata key by which torch's newer exporter lists a node's modules, outermost first, as text.
_SCOPES = "pkg.torch.onnx.name_scopes"


@dataclass(frozen=True)
class LinearLayer:
    """A layer: its weight, the nodes that multiply by it, and the type in which they compute.

    - `weight`: [outputs, inputs, ...], or with `is_transposed` [inputs, outputs].
    - `factor`: multiplies the product.
    - `why_not`: why no adapter can be added to this weight.
    - `is_read_both_ways`: some of the nodes multiply by the weight, others by its transpose. An adapter is for one way.
    """

    layer: Layer
    weight: ir.Value
    nodes: tuple[ir.Node, ...]
    dtype: ir.DataType
    is_transposed: bool
    factor: float
    why_not: str
    is_read_both_ways: bool = False


def find_linear_layers(graph: Graph) -> list[LinearLayer]:
    """The linear layers of a model, in its order, one for each weight."""
    layers: dict[ir.Value, LinearLayer] = {}
    for node in graph.nodes:
        if (layer := _layer_of(node)) is not None:
            before = layers.setdefault(layer.weight, replace(layer, nodes=()))
            both_ways = before.is_read_both_ways or before.is_transposed != layer.is_transposed
            layers[layer.weight] = replace(before, nodes=(*before.nodes, node), is_read_both_ways=both_ways)
    return list(layers.values())


def _layer_of(node: ir.Node) -> LinearLayer | None:
    """The linear layer of a node; None if it is none."""
    reader, at, quantized = _READERS.get((node.domain, node.op_type), (None, 0, False))
    if reader is None or len(node.inputs) <= at or node.inputs[at] is None:
        return None
    weight, transposed, dtype = node.inputs[at], False, None
    assert weight is not None
    while (maker := weight.producer()) is not None and maker.inputs and maker.inputs[0] is not None:
        if _is_transpose(maker):
            transposed = not transposed
        elif operator_of(maker).dequantizes:
            quantized = True
            dtype = dtype or (maker.inputs[1].dtype if maker.inputs[1] is not None else None)  # the scale's
        elif maker.op_type == "Cast":
            dtype = dtype or ir.DataType(maker.attributes.get_int("to", int(ir.DataType.FLOAT)))
        else:
            return None
        weight = maker.inputs[0]
    shape = shape_of(weight) if known_weight(weight) is not None else ()
    multiplied = None if len(shape) < 2 else reader(node, shape, transposed)
    if multiplied is None:
        return None
    dtype = dtype or next((value.dtype for value in node.inputs[2:3] if value is not None), None)  # a scale's, or bias'
    dtype = dtype or weight.dtype or ir.DataType.FLOAT
    if not dtype.is_floating_point():
        if not quantized:
            return None
        dtype = ir.DataType.FLOAT  # dynamically quantized inputs are always of this type
    sizes, is_transposed, factor = multiplied
    layer = replace(sizes, names=tuple(dict.fromkeys(_names(node, weight))))
    return LinearLayer(layer, weight, (node,), dtype, is_transposed, factor, _why_not(node, weight, quantized))


def _why_not(node: ir.Node, weight: ir.Value, quantized: bool) -> str:
    """Why no adapter can be added to the weight of this node; "" if one can."""
    groups = node.attributes.get_int("group", 1)
    if quantized:
        return QUANTIZED
    if groups != 1:
        return f"its convolution has {groups} groups"
    return "its weight has other readers" if len(weight.uses()) > 1 else ""


def _is_transpose(node: ir.Node) -> bool:
    """Whether a node transposes a matrix."""
    order = node.attributes.get_ints("perm", None)
    return is_onnx(node, "Transpose") and (order is None or list(order) == [1, 0])


# A layer without names, and `LinearLayer`'s `is_transposed` and `factor`.
_Multiplied = tuple[Layer, bool, float]


def _product(node: ir.Node, shape: Sequence[int], transposed: bool) -> _Multiplied | None:
    if len(shape) != 2:
        return None
    transposes = bool(node.attributes.get_int("transB", 0)) != transposed
    inputs, outputs = shape[::-1] if transposes else shape
    return Layer((), inputs, outputs), not transposes, node.attributes.get_float("alpha", 1.0)


def _convolution(node: ir.Node, shape: Sequence[int], transposed: bool) -> _Multiplied | None:
    outputs, inputs, *kernel = shape
    return None if transposed else (Layer((), inputs, outputs, tuple(kernel)), False, 1.0)  # all axes are in reverse


def _packed(node: ir.Node, shape: Sequence[int], transposed: bool) -> _Multiplied | None:
    return Layer((), node.attributes.get_int("K", 0), node.attributes.get_int("N", 0)), False, 1.0


# By operator: the function that reads a layer, the index of the weight among its inputs, and whether it is quantized.
_READERS: dict[tuple[str, str], tuple[Callable[[ir.Node, Sequence[int], bool], _Multiplied | None], int, bool]] = {
    ("", "MatMul"): (_product, 1, False),
    ("", "Gemm"): (_product, 1, False),
    (MICROSOFT, "FusedMatMul"): (_product, 1, False),
    ("", "Conv"): (_convolution, 1, False),
    (MICROSOFT, "MatMulNBits"): (_packed, 1, True),
    ("", "MatMulInteger"): (_product, 1, True),
    (MICROSOFT, "MatMulIntegerToFloat"): (_product, 1, True),
    (MICROSOFT, "DynamicQuantizeMatMul"): (_product, 1, True),
    ("", "ConvInteger"): (_convolution, 1, True),
    ("", "QLinearMatMul"): (_product, 3, True),
    ("", "QLinearConv"): (_convolution, 3, True),
}


def _names(node: ir.Node, weight: ir.Value) -> Iterator[str]:
    """A layer's possible names: its weight's, its node's, and its module's, as exporters write them."""
    if re.search(r"[./]", name := weight.name or ""):
        yield re.sub(r"[./](base_layer|MatMul|weight|qweight|weight_\w+)(?=$|[./])", "", name)
    if "/" in (name := node.name or ""):
        yield name.rpartition("/")[0]
    yield from modules_of(node)[-1:]


def modules_of(node: ir.Node) -> list[str]:
    """The names of the modules that a node belongs to, outermost first."""
    try:
        scopes = json.loads(node.metadata_props.get(_SCOPES, "[]").replace("'", '"'))
    except ValueError:
        scopes = []
    return [scope for scope in scopes[:-1] if isinstance(scope, str) and scope]
