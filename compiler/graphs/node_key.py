"""Keys by which nodes are compared: nodes with equal keys and equal inputs compute the same."""

from __future__ import annotations

from collections.abc import Hashable

import onnx_ir as ir

# The types of attributes that can be compared.
_COMPARED = frozenset(
    ir.AttributeType[name] for name in ("INT", "INTS", "FLOAT", "FLOATS", "STRING", "STRINGS", "TENSOR", "TYPE_PROTO")
)


def node_key(node: ir.Node) -> Hashable:
    """A node's operator and attributes; None for a node that can't be compared, such as an If."""
    attributes = node.attributes.data.values()  # the mapping's own views take five times as long
    if any(attribute.type not in _COMPARED or attribute.is_ref() for attribute in attributes):
        return None
    said = [(attribute.name, attribute.type, _value(attribute)) for attribute in attributes]
    return node.op_identifier(), len(node.outputs), tuple(said)


def _value(attribute: ir.Attr) -> Hashable:
    value: Hashable = attribute.value
    return tensor_key(attribute.as_tensor()) if attribute.type == ir.AttributeType.TENSOR else value


def tensor_key(tensor: ir.TensorProtocol | None) -> Hashable:
    """A tensor's type, shape and elements."""
    if tensor is None:
        return None
    is_text = tensor.dtype == ir.DataType.STRING
    elements = tuple(tensor.numpy().reshape(-1).tolist()) if is_text else tensor.tobytes()
    return tensor.dtype, tuple(tensor.shape.numpy()), elements
