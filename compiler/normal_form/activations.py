"""Takes activations out of the products and convolutions into which ONNX Runtime fused them.

Files that it saved optimized have them. An activation needs a whole sum, so inside of the operator no rank could have
a part of the sum. Engines fuse both again when they are loaded.
"""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.reads import all_nodes
from splitc.compiler.nodes import operator_name, settings_of

PRODUCTS = {"com.microsoft.FusedConv": "Conv", "com.microsoft.FusedGemm": "Gemm"}
# The parameters of activations, in the order in which FusedConv lists them.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "Clip": ("min", "max"),
    "Elu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "HardSwish": (),
    "LeakyRelu": ("alpha",),
    "Relu": (),
    "Selu": ("alpha", "gamma"),
    "Sigmoid": (),
    "Softplus": (),
    "Softsign": (),
    "Tanh": (),
    "ThresholdedRelu": ("alpha",),
}


def take_out_activations(model: ir.Model) -> None:
    """Replace fused products by the product, the addition of another image if there is one, and the activation."""
    editor = Editor(model.graph)
    for node in [node for node in all_nodes(model.graph) if operator_name(node) in PRODUCTS]:
        if node.attributes.get_string("activation", "") in PARAMETERS:
            _take_apart(node, editor)


def _take_apart(node: ir.Node, editor: Editor) -> None:
    (made,) = node.outputs
    settings = {name: value for name, value in settings_of(node).items() if not name.startswith("activation")}
    product = ir.node(PRODUCTS[operator_name(node)], node.inputs[:3], settings, name=node.name)
    node.prepend(product)
    (value,) = product.outputs
    value.name, value.type, value.shape = f"{made.name}/product", made.type, made.shape
    if len(node.inputs) > 3 and node.inputs[3] is not None:
        value = editor.before(node, "Add", value, node.inputs[3])
        value.name, value.type, value.shape = f"{made.name}/sum", made.type, made.shape
    editor.replace(node, _activation(node, value, editor))


def _activation(node: ir.Node, value: ir.Value, editor: Editor) -> ir.Node:
    name = node.attributes.get_string("activation", "")
    listed = list(node.attributes.get_floats("activation_params", ()))
    given = dict(zip(PARAMETERS[name], listed, strict=False))
    for parameter in PARAMETERS[name]:
        if (own := node.attributes.get(f"activation_{parameter}")) is not None:
            given[parameter] = own.as_float()
    if name != "Clip" or editor.graph.opset_imports.get("", 17) < 11:
        return ir.node(name, [value], given)
    weight = node.inputs[1]
    assert weight is not None
    return ir.node(name, [value, *(editor.scalar(given[limit], weight) for limit in PARAMETERS[name])])
