"""Finds attention whose bias has rows of any length, which ONNX Runtime's memory-efficient kernel does not take.

The kernel needs rows of a bias [batch or 1, heads or 1, queries, keys] that begin at multiples of 16 bytes. ONNX
Runtime chooses it by the number of queries, as if there were as many keys. With 64 queries and 77 keys, as in
cross-attention with a mask, a request in half precision fails: "Attention::check_supported(p) was false".
"""

from __future__ import annotations

import onnx_ir as ir

from splitc.compiler.graphs.origins import own_shape
from splitc.compiler.nodes import operator_name

# By operator, the index of the input that is added to the scores.
BIASES = {"Attention": 3, "com.microsoft.Attention": 5, "com.microsoft.MultiHeadAttention": 5}
# The numbers of 16 bits in 16 bytes.
ALIGNED = 8


def adds_unaligned_bias(graph: ir.Graph) -> bool:
    """Whether any attention adds a bias whose rows may be as long as the kernel does not take."""
    return any(map(_is_unaligned, graph.all_nodes()))


def _is_unaligned(node: ir.Node) -> bool:
    place = BIASES.get(operator_name(node))
    bias = next(iter(node.inputs[place : place + 1]), None) if place is not None else None
    if bias is None:
        return False
    shape = own_shape(bias)
    if shape is None or len(shape) < 2:
        return True
    queries, keys = shape[-2:]
    if isinstance(keys, int):
        return keys % ALIGNED != 0
    return keys.value is None or keys != queries
