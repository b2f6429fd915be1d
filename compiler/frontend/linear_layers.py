"""The layers whose weight an adapter may change, products and convolutions, with the names that they go by."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import onnx_ir as ir

from splitc.compiler.frontend.graph import Graph
from splitc.compiler.frontend.shapes import shape_of
from splitc.compiler.operators.registry import operator_of
from splitc.runtime.adapters.matching import Layer

# What torch's newer exporter writes at a node: the modules that it is in, from the model's on, as a list in text.
_SCOPES = "pkg.torch.onnx.name_scopes"


@dataclass(frozen=True)
class LinearLayer:
    """A layer's weight, and how its product reads it.

    The weight is [outputs, inputs, ...], or with `is_transposed` [inputs, outputs]. The product is multiplied by
    `factor`. A `why_not` says why no adapter can be added to this weight.
    """

    layer: Layer
    weight: ir.Value
    is_transposed: bool = False
    factor: float = 1.0
    why_not: str = ""


def find_linear_layers(graph: Graph) -> list[LinearLayer]:
    """The linear layers of a model, in its order: one for each weight."""
    layers = [layer for node in graph.nodes if (layer := _layer_of(node)) is not None]
    return list({layer.weight: layer for layer in reversed(layers)}.values())[::-1]


def _layer_of(node: ir.Node) -> LinearLayer | None:
    """The linear layer that a node is; None if it is none."""
    reader = _READERS.get((node.domain, node.op_type))
    if reader is None or len(node.inputs) < 2 or node.inputs[1] is None:
        return None
    weight, turned, quantized = node.inputs[1], False, False
    while (maker := weight.producer()) is not None and maker.inputs and maker.inputs[0] is not None:
        if _turns(maker):
            turned = not turned
        elif operator_of(maker).dequantizes:
            quantized = True
        elif maker.op_type != "Cast":
            return None
        weight = maker.inputs[0]
    shape = shape_of(weight) if weight.is_initializer() else ()
    layer = None if len(shape) < 2 else reader(node, weight, shape, turned)
    return replace(layer, why_not="its weight is quantized") if quantized and layer is not None else layer


def _turns(node: ir.Node) -> bool:
    """Whether a node turns a matrix."""
    order = node.attributes.get_ints("perm", None)
    return node.op_type == "Transpose" and not node.domain and (order is None or list(order) == [1, 0])


def _product(node: ir.Node, weight: ir.Value, shape: tuple[int, ...], turned: bool) -> LinearLayer | None:
    if len(shape) != 2:
        return None
    transposes = bool(node.attributes.get_int("transB", 0)) != turned
    factor = node.attributes.get_float("alpha", 1.0)
    inputs, outputs = shape[::-1] if transposes else shape
    return _made(node, weight, Layer((), inputs, outputs), not transposes, factor)


def _convolution(node: ir.Node, weight: ir.Value, shape: tuple[int, ...], turned: bool) -> LinearLayer | None:
    outputs, inputs, *kernel = shape
    groups = node.attributes.get_int("group", 1)
    why = f"its convolution has {groups} groups" if groups != 1 else ""
    return _made(node, weight, Layer((), inputs, outputs, tuple(kernel)), False, 1.0, why)


def _packed(node: ir.Node, weight: ir.Value, shape: tuple[int, ...], turned: bool) -> LinearLayer | None:
    inputs, outputs = node.attributes.get_int("K", 0), node.attributes.get_int("N", 0)
    return _made(node, weight, Layer((), inputs, outputs), False, 1.0, "its weight is quantized")


_READERS = {
    ("", "MatMul"): _product,
    ("", "Gemm"): _product,
    ("com.microsoft", "FusedMatMul"): _product,
    ("com.microsoft", "FusedGemm"): _product,
    ("", "Conv"): _convolution,
    ("com.microsoft", "FusedConv"): _convolution,
    ("com.microsoft", "MatMulNBits"): _packed,
}


def _made(
    node: ir.Node, weight: ir.Value, sizes: Layer, is_transposed: bool, factor: float, why_not: str = ""
) -> LinearLayer:
    names = tuple(dict.fromkeys(_names(node, weight)))
    if not why_not and len(weight.uses()) > 1:
        why_not = "its weight is read in several places"
    return LinearLayer(Layer(names, sizes.inputs, sizes.outputs, sizes.kernel), weight, is_transposed, factor, why_not)


def _names(node: ir.Node, weight: ir.Value) -> Iterator[str]:
    """The names that exporters leave of a layer: its weight's, its node's, or those of the scopes it is in."""
    if re.search(r"[./]", name := weight.name or ""):
        yield re.sub(r"[./](base_layer|MatMul|weight|qweight|weight_\w+)(?=$|[./])", "", name)
    if "/" in (name := node.name or ""):
        yield name.rpartition("/")[0]
    try:
        scopes = json.loads(node.metadata_props.get(_SCOPES, "[]").replace("'", '"'))
    except ValueError:
        scopes = []
    modules = [scope for scope in scopes[:-1] if isinstance(scope, str) and scope]
    if modules:
        yield modules[-1]
