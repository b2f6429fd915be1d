"""Moves the norms of queries and keys (QK norm) out of GroupQueryAttention.

onnxruntime-genai's builder passes their weights to the operator, for models such as Qwen3. Only the CUDA kernel
supports them, but splitc tries models on CPUs, and packages may run there.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from splitc.compiler.graphs.editor import Editor
from splitc.compiler.nodes import operator_name

OPERATOR, NORM = "com.microsoft.GroupQueryAttention", "SimplifiedLayerNormalization"
# The indices of the operator's inputs for the norms' weights: of queries, and of keys.
WEIGHTS = slice(14, 16)
EPSILON = "qk_norm_epsilon"


def take_out_norms(model: ir.Model) -> bool:
    """Normalize queries and keys before the operator, in place. Returns whether there are any such norms."""
    editor, is_changed = Editor(model.graph), False
    for node in [node for node in model.graph if operator_name(node) == OPERATOR]:
        weights = [value for value in node.inputs[WEIGHTS] if value is not None and value.shape is not None]
        heads = [node.attributes.get_int(name, 0) for name in ("num_heads", "kv_num_heads")]
        size = weights[0].shape[0] if weights and weights[0].shape is not None else None
        if len(weights) < len(heads) or not all(heads) or not isinstance(size, int):
            continue
        if node.inputs[1] is None:
            _take_apart(node, heads, size, editor)
        for place, (weight, count) in enumerate(zip(weights, heads, strict=True)):
            _norm(node, place, weight, (count, size), editor)
        node.resize_inputs(WEIGHTS.start)
        node.attributes.pop(EPSILON, None)
        is_changed = True
    return is_changed


def _take_apart(node: ir.Node, heads: list[int], size: int, editor: Editor) -> None:
    """Split packed queries, keys and values before the operator."""
    counts = editor.numbers(heads[0] * size, heads[1] * size, heads[1] * size)
    split = ir.node("Split", [node.inputs[0], counts], {"axis": -1}, num_outputs=3)
    node.prepend(split)
    for place, (made, role) in enumerate(zip(split.outputs, ("query", "key", "value"), strict=True)):
        made.name = f"{node.outputs[0].name}/{role}"
        node.replace_input_with(place, made)


def _norm(node: ir.Node, place: int, weight: ir.Value, heads: tuple[int, int], editor: Editor) -> None:
    """Normalize each head of one of the operator's inputs [batch, length, heads x size]; `heads` are both numbers."""
    name, value = f"{node.outputs[0].name}/norm{place}", node.inputs[place]
    apart = editor.before(node, "Reshape", value, editor.numbers(0, 0, *heads))
    epsilon = node.attributes.get_float(EPSILON, 1e-6)
    normed = editor.before(node, NORM, apart, weight, axis=-1, epsilon=epsilon)
    flat = editor.numbers(0, 0, math.prod(heads))
    made = editor.before(node, "Reshape", normed, flat)
    for one, role in ((apart, "apart"), (normed, "normed"), (made, "made")):
        one.name = f"{name}/{role}"
    node.replace_input_with(place, made)
