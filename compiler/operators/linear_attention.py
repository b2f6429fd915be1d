"""Linear attention, with the convolution before it and the gates and norms around it. Its state has one size."""

from __future__ import annotations

import math

import onnx_ir as ir

from splitc.compiler.operators import axes as ax
from splitc.compiler.operators.axes import Axis
from splitc.compiler.operators.linear import convolution_flops
from splitc.compiler.operators.operation import Operation
from splitc.compiler.operators.operator import Operator, Shapes

# Attributes of CausalConvWithState for which its inputs or its state have another layout.
OTHER_LAYOUTS = {"input_channel_offset": 0, "input_channels": 0, "state_length": 0, "state_channels_last": -1}


def linear_attention(op: Operation) -> None:
    """Queries, keys and values [b, t, heads x d], which may each have another number of heads.

    The state is [b, heads of values, d, e]. Decays are one number for each head, or for each element of its keys.
    """
    queries, values = op.number("q_num_heads", 0), op.number("kv_num_heads", 0)
    if not op.has(0, 1, 2) or queries <= 0 or values <= 0 or ax.size_of(op.input(0)[-1]) % queries:
        return
    size = ax.size_of(op.input(0)[-1]) // queries
    heads = _heads(queries, ax.size_of(op.input(1)[-1]) // size, values)
    if heads is None:
        return
    sizes = {"d": ax.new_axis(size), "e": ax.new_axis(ax.size_of(op.input(2)[-1]) // values)}
    decay = "b t (k v)" if not op.has(4) or ax.size_of(op.input(4)[-1]) == values else "b t (k v d)"
    made = "q" if queries > values else "v"
    op.pattern(
        f"b t (k q d), b t (k u d), b t (k v e), b (k v) d e, {decay}, b t (k v) -> b t (k {made} e), b (k v) d e",
        whole="tdequv",
        known={**heads, **sizes},
    )
    op.attributes.update(q_num_heads=[(*heads["k"], *heads["q"])], kv_num_heads=[(*heads["k"], *heads["v"])])


def gated_delta_net(op: Operation) -> None:
    """Queries and keys [b, t, heads, d], values [b, t, heads of values, e], a state [b, heads of values, e, d].

    Each head of queries and keys has as many of values.
    """
    if not op.has(0, 1, 2, 6) or op.has(3) or op.has(9) or op.has_output(2) or len(op.input(0)) != 4:
        return  # packed tokens, or captured transitions
    keys, values = op.input(0)[-2], op.input(2)[-2]
    per_key = ax.size_of(values) // max(1, ax.size_of(keys))
    heads = {"k": keys, "v": ax.new_axis(per_key), "d": op.input(0)[-1]}
    if ax.size_of((*keys, *heads["v"])) != ax.size_of(values):
        return
    by_element = "b t (k v) d" if op.has(4) and len(op.input(4)) == 4 else "b t (k v)"
    bias = "-" if not op.has(8) else "(k v) d" if len(op.input(8)) == 2 else "(k v)"
    if bias == "(k v)" and ax.size_of(op.input(8)[0]) != ax.size_of(values):
        bias = "(k v d)"
    given = f"b t k d, b t k d, b t (k v) e, -, {by_element}, b t (k v), b (k v) e d, (k v), {bias}"
    op.pattern(f"{given} -> b t (k v) e, b (k v) e d", whole="tdev", known=heads)


def _heads(queries: int, keys: int, values: int) -> dict[str, Axis] | None:
    """The factor k that all heads have, and those of queries (q), keys (u) and values (v) for each; else None."""
    counts = {"q": queries, "u": keys, "v": values}
    least = min(counts.values())
    if least <= 0 or any(count % least for count in counts.values()):
        return None
    return {"k": ax.new_axis(least), **{name: ax.new_axis(count // least) for name, count in counts.items()}}


def gate(op: Operation) -> None:
    """Decays and rates of heads: all inputs are combined element by element."""
    op.pattern("b t h, h, h, b t h -> b t h, b t h")


def gated_norm(op: Operation) -> None:
    """Each head's elements are normalized: [..., heads x d], with a scale of d."""
    data, scale = op.input(0), op.input(1)[0]
    if ax.size_of(data[-1]) % max(1, ax.size_of(scale)):
        return
    heads = ax.new_axis(ax.size_of(data[-1]) // ax.size_of(scale))
    for other in (op.input(2), op.output()):
        op.relate_all(data[:-1], other[:-1])
    op.pattern("(h d), d, (h d) -> (h d)", whole="d", known={"h": heads, "d": scale})


def gated_sum(op: Operation) -> None:
    """X + Y x gate, which is one number a row."""
    data, gates = op.input(0), op.input(2)
    if op.has(3):
        return
    for other in (op.input(1), op.output()):
        op.relate_all(data, other)
    op.relate_all(data[:-1], gates[:-1])
    op.linear = (frozenset([0, 1]),)


def causal_convolution(op: Operation) -> None:
    """Each channel is convolved independently along time. The positions before it are a state, or a window of them."""
    if len(op.input(0)) != 3 or any(op.number(name, usual) != usual for name, usual in OTHER_LAYOUTS.items()):
        return
    if op.number("channels_last", 0):
        op.pattern("b l c, c u k, c, b s c -> b l c, b s c", whole="luks")
    else:
        op.pattern("b c l, c u k, c, b c s -> b c l, b c s", whole="luks")


def linear_attention_flops(node: ir.Node, inputs: Shapes, outputs: Shapes) -> int:
    """8 for each token and element of the state: it decays, is read by keys, changed, and read by queries."""
    state = outputs[1] if len(outputs) > 1 and outputs[1] else ()
    return 8 * math.prod(outputs[0][:-1]) * math.prod(state[-3:])


OPERATORS = (
    Operator("com.microsoft.CausalConvWithState", causal_convolution, convolution_flops, states={1: 3}),
    Operator("com.microsoft.GatedAdd", gated_sum),
    Operator("com.microsoft.GatedDeltaNet", gated_delta_net, linear_attention_flops, states={1: 6}),
    Operator("com.microsoft.GatedRMSNorm", gated_norm, is_norm=True),
    Operator("com.microsoft.LinearAttention", linear_attention, linear_attention_flops, states={1: 3}),
    Operator("com.microsoft.LinearAttentionGate", gate),
)
