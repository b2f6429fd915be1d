"""Decomposes attention with caches in place in engines for GPUs where ONNX Runtime has no CUDA kernel.

That is GroupQueryAttention in float32 or with sinks, and LatentAttention (caches/latent_cache.py).

The KV caches are written by index (ScatterElements), so that all shapes stay the same from token to token and requests
can be replayed. An If on sizes chooses between caches that the request fills and shorter ones, which are padded first.

See com.microsoft.GroupQueryAttention in ONNX Runtime's ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import onnx_ir as ir

from splitc.compiler.caches.grouped import BIAS, KEY, LASTS, PASTS, QUERY, SINKS, TABLES, TOTAL
from splitc.compiler.caches.latent_cache import OPSET
from splitc.compiler.engine_graphs.attention_nodes import Attention, AttentionOnLatents, Nodes, put_in_place
from splitc.compiler.engine_graphs.cache_rows import Rows, WindowRows
from splitc.compiler.engine_graphs.cpu_values import runs_on_gpu
from splitc.compiler.graphs.editor import Editor
from splitc.compiler.graphs.origins import described, origin_of
from splitc.compiler.inference.shapes import fixed_size
from splitc.compiler.nodes import MICROSOFT, operator_name
from splitc.compiler.operators.gpu_kernels import GROUPED, LATENT

# The attributes that the decomposition supports. Others must be 0.
KNOWN = frozenset(
    {"num_heads", "kv_num_heads", "scale", "causal", "softcap", "local_window_size", "do_rotary", "rotary_interleaved"}
)
WINDOWED = "sliding_window_cache"


def decompose_attention(graph: ir.Graph, operators: Collection[str] = (GROUPED, LATENT)) -> bool:
    """Decompose each of these operators that has no CUDA kernel, in place, unless it has an unsupported attribute.

    Returns whether any was decomposed.
    """
    if graph.opset_imports.get("", 1) < OPSET:
        return False
    editor, requests = Editor(graph), dict[Any, dict[Any, ir.Value]]()
    for node in list(graph):
        name = operator_name(node)
        if name not in operators or runs_on_gpu(node) or not (name == LATENT or _is_known(node)):
            continue
        if (sizes := _sizes_of(node)) is None:
            continue
        nodes = Nodes(f"{node.outputs[0].name}/decomposed", editor)
        kind = WindowRows if _holds_window(node) else Rows
        shared = requests.setdefault((kind, node.inputs[LASTS], node.inputs[TOTAL], _rows_of(node)), {})
        attention = AttentionOnLatents(node) if name == LATENT else Attention(node)
        put_in_place(node, nodes.made, _write(kind(attention, sizes, nodes, shared)))
    return bool(requests)


def _sizes_of(node: ir.Node) -> tuple[int, int] | None:
    """The last sizes of the caches of keys and of values; None if they are not known."""
    if operator_name(node) == LATENT:
        shared, rank = node.attributes["sizes"].as_ints()
        return shared, rank
    whole = origin_of(node) or node
    for value in (whole.inputs[PASTS[0]], whole.outputs[1]):
        shape = None if value is None else described(value).shape
        if shape is not None and len(shape) == 4 and (size := fixed_size(shape[3])) is not None:
            return size, size
    return None


def _rows_of(node: ir.Node) -> int | str:
    """The declared number of rows of a cache: a number, or a symbol."""
    past = node.inputs[PASTS[0]]
    assert past is not None
    shape = described(past).shape
    rows = None if shape is None else shape[2]
    return rows if isinstance(rows, int) else f"{rows or past.name}"


def _is_known(node: ir.Node) -> bool:
    """Whether the decomposition supports all inputs, outputs and attributes of a node."""
    beyond = [*node.inputs[SINKS + 1 :], *node.outputs[3:]]
    known = {*KNOWN, WINDOWED} if _holds_window(node) else KNOWN
    strange = [attribute for name, attribute in node.attributes.items() if name not in known]
    return (
        len(node.inputs) > TOTAL
        and len(node.outputs) >= 3
        and all(node.inputs[place] is not None for place in (QUERY, *PASTS, LASTS, TOTAL))
        and not any(value is not None and value.name for value in beyond)
        and all(attribute.type == ir.AttributeType.INT and not attribute.as_int() for attribute in strange)
    )


def _holds_window(node: ir.Node) -> bool:
    """Whether the caches are as long as the sliding window, and hold nothing else."""
    window = node.attributes.get_int("local_window_size", -1)
    has_bias = len(node.inputs) > BIAS and node.inputs[BIAS] is not None
    return bool(node.attributes.get_int(WINDOWED, 0)) and window > 0 and _rows_of(node) == window and not has_bias


def _write(rows: Rows) -> list[ir.Value]:
    """Add the nodes that compute the operator's outputs: the attention's rows, and both caches."""
    b, attention = rows.nodes, rows.attention
    query, *new = _parts(attention, rows)
    if attention.node.attributes.get_int("do_rotary", 0):
        query, new[0] = (
            _rotated(value, heads, attention, rows)
            for value, heads in ((query, attention.heads), (new[0], attention.kv_heads))
        )
    added = [attention.by_heads(value, attention.kv_heads, b) for value in new]
    made, *presents = rows.attend(attention.query_rows(query, b), added)
    return [attention.merged(made, b), *presents]


def _parts(attention: Attention, rows: Rows) -> list[ir.Value]:
    """Queries, keys and values [batch, length, heads x size], from three inputs or a packed one."""
    given = [attention.input(place) for place in (QUERY, KEY, KEY + 1)]
    if given[1] is None:
        counts = attention.heads, attention.kv_heads, attention.kv_heads
        sizes = rows.nodes.editor.numbers(*(heads * rows.sizes[0] for heads in counts))
        return [*rows.nodes.add("Split", [given[0], sizes], 3, attributes=[ir.AttrInt64("axis", 2)])]
    return [value for value in given if value is not None]


def _rotated(value: ir.Value, heads: int, attention: Attention, rows: Rows) -> ir.Value:
    cosines, sines = (attention.input(place) for place in TABLES)
    attributes: dict[str, Any] = {"interleaved": attention.node.attributes.get_int("rotary_interleaved", 0)}
    table = None if cosines is None else described(cosines).shape
    width = None if table is None else table[-1]
    if isinstance(width, int) and 2 * width != rows.sizes[0]:
        attributes |= {"rotary_embedding_dim": 2 * width, "num_heads": heads}
    return rows.nodes.one("RotaryEmbedding", value, rows.positions(), cosines, sines, domain=MICROSOFT, **attributes)
