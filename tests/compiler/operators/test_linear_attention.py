"""Linear attention is sharded by heads, with its convolution, gates, norm and states, and one sum behind it."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from splitc.compiler.analysis.costs import node_flops
from tests.helpers.attention import HIDDEN, normed, project_back
from tests.helpers.blocks import MORE_THAN_HEADS, SHARES, Block
from tests.helpers.needs import needs_delta_net
from tests.helpers.operators import INNER, Tiny, check_operator, sandwich, softmax, through

# The number of tokens, and the sizes of keys and of values in a head.
TOKENS, KEY, VALUE = 5, 4, 6
HEADS = 4


def flat(b: Block, x: ir.Value, name: str, width: int) -> ir.Value:
    return b.op("MatMul", x, b.w(name, HIDDEN, width))


def normalized(b: Block, v: ir.Value, heads: int) -> ir.Value:
    """Each head's keys have length 1: otherwise the state grows without bound."""
    by_heads = b.op("Reshape", v, b.ints(0, 0, heads, KEY))
    return b.op("Reshape", b.op("LpNormalization", by_heads, axis=-1), b.ints(0, 0, heads * KEY))


def linear_attention(queries: int, keys: int, values: int, keyed: bool = False) -> Block:
    """Gated attention of a state that the caller holds, and of its gate's decays and rates. Heads are flat."""
    b = Block()
    x = normed(b)
    q, k, v = (
        normalized(b, flat(b, x, "q", queries * KEY), queries),
        normalized(b, flat(b, x, "k", keys * KEY), keys),
        flat(b, x, "v", values * VALUE),
    )
    decay, rate = b.ops(
        "com.microsoft.LinearAttentionGate",
        flat(b, x, "a", values),
        b.w("shift", values),
        b.weight("negative", ir.tensor(-np.abs(b.random("negative", values)))),
        flat(b, x, "b", values),
        outputs=2,
    )
    if keyed:
        decay = b.op("Neg", b.op("Sigmoid", flat(b, x, "c", values * KEY)))
    shape = (2, values, KEY, VALUE)
    past = b.data("past", shape, ["n", *shape[1:]])
    heads = {"q_num_heads": queries, "kv_num_heads": values}
    made, state = b.ops("com.microsoft.LinearAttention", q, k, v, past, decay, rate, outputs=2, **heads)
    width = max(queries, values) * VALUE
    gated = b.op("com.microsoft.GatedRMSNorm", made, b.w("scale", VALUE), flat(b, x, "z", width), epsilon=1e-5)
    project_back(b, gated, width)
    b.give(state, "state", ["n", *shape[1:]])
    return b


def delta_net(keys: int, values: int, keyed: bool = False) -> Block:
    """As `linear_attention`, with heads as an axis, and the gate and the norm of keys inside the operator."""
    b = Block()
    x = normed(b)
    q, k, v, z = (
        b.op("Reshape", flat(b, x, name, count * size), b.ints(0, 0, count, size))
        for name, count, size in (("q", keys, KEY), ("k", keys, KEY), ("v", values, VALUE), ("c", values, KEY))
    )
    decay, rate = z if keyed else flat(b, x, "a", values), flat(b, x, "b", values)
    shape = (2, values, VALUE, KEY)
    past = b.data("past", shape, ["n", *shape[1:]])
    how = {"gate_activation": "qwen", "beta_activation": "sigmoid"}
    given = [
        q,
        k,
        v,
        None,
        decay,
        rate,
        past,
        b.w("logs", values),
        b.w("shift", *([values, KEY] if keyed else [values])),
    ]
    made, state = b.ops("com.microsoft.GatedDeltaNet", *given, outputs=2, qk_l2_norm=1, **how)
    project_back(b, b.op("Reshape", made, b.ints(0, 0, values * VALUE)), values * VALUE)
    b.give(state, "state", ["n", *shape[1:]])
    return b


def causal(channels_last: bool) -> Block:
    """A convolution for each channel, with the places before the first one as its state."""
    b = Block()
    x = softmax(b, b.data("x", (2, TOKENS, HIDDEN), ["n", TOKENS, HIDDEN]))
    wide, shape, order = flat(b, x, "A", INNER), (2, INNER, 2), [0, 2, 1]
    if channels_last:
        shape = (2, 2, INNER)
    else:
        wide = b.op("Transpose", wide, perm=order)
    past = b.data("past", shape, ["n", *shape[1:]])
    own = b.w("own", INNER, 1, 3), b.w("shift", INNER)
    how = {"activation": "silu", **({"channels_last": 1} if channels_last else {})}
    made, present = b.ops("com.microsoft.CausalConvWithState", wide, *own, past, outputs=2, **how)
    made = b.op("Sigmoid", made if channels_last else b.op("Transpose", made, perm=order))
    b.give(softmax(b, b.op("MatMul", made, b.w("B", INNER, HIDDEN))))
    b.give(present, "present", ["n", *shape[1:]])
    return b


def gated_sum(both: bool) -> Block:
    """Two products are added after one has a gate: a sum for both, or for one of them if the other is whole."""
    b = Block()
    x = normed(b)
    inner = b.op("Relu", b.op("MatMul", x, b.w("A", HIDDEN, INNER)))
    first = b.op("MatMul", inner, b.w("B", INNER, HIDDEN)) if both else x
    second = b.op("MatMul", inner, b.w("C", INNER, HIDDEN))
    gates = b.op("Sigmoid", b.op("MatMul", x, b.w("g", HIDDEN, 1)))
    b.give(softmax(b, b.op("com.microsoft.GatedAdd", first, second, gates)))
    return b


GATES = {"a", "b", "shift"}
ATTENTION = {"q", "k", "v", "o", "z", "negative", *GATES}
DELTA_NET, DELTA = "com.microsoft.GatedDeltaNet", {"q", "k", "v", "o", "b", "logs", "shift"}


def by_heads(build: partial[Block], split: Collection[str]) -> Tiny:
    return Tiny(build, split, sums=1, shares=MORE_THAN_HEADS)


GRAPHS: dict[str, Tiny] = {
    "com.microsoft.CausalConvWithState": Tiny(
        partial(causal, False), ["A", "own", "shift", "B"], sums=1, shares=SHARES
    ),
    "com.microsoft.GatedAdd": Tiny(partial(gated_sum, True), "ABC", sums=1, shares=SHARES),
    DELTA_NET: by_heads(partial(delta_net, 2, HEADS), {*DELTA, "a"}),
    "com.microsoft.GatedRMSNorm": by_heads(partial(linear_attention, HEADS, HEADS, HEADS), ATTENTION),
    "com.microsoft.LinearAttention": by_heads(partial(linear_attention, 2, 2, HEADS), ATTENTION),
    "com.microsoft.LinearAttentionGate": by_heads(partial(linear_attention, HEADS, 2, 2), ATTENTION),
}
FORMS: dict[str, Tiny] = {
    "channels last": Tiny(partial(causal, True), ["A", "own", "shift", "B"], sums=1, shares=SHARES),
    "a sum of one product": Tiny(partial(gated_sum, False), "AC", sums=1, shares=SHARES),
    "a number for each key's element": by_heads(
        partial(linear_attention, HEADS, HEADS, HEADS, keyed=True), {*ATTENTION, "c"} - {"a", "shift", "negative"}
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_delta_net if name == DELTA_NET else ()) for name in GRAPHS]
)
def test_operator_is_sharded(name: str, tmp_path: Path) -> None:
    check_operator(GRAPHS, name, tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_other_form_is_sharded(form: str, tmp_path: Path) -> None:
    FORMS[form].check(tmp_path)


@needs_delta_net
@pytest.mark.parametrize("keyed", [False, True])
def test_delta_net_of_as_many_heads_is_sharded(keyed: bool, tmp_path: Path) -> None:
    by_heads(partial(delta_net, HEADS, HEADS, keyed), {*DELTA, "c" if keyed else "a"}).check(tmp_path)


def test_norm_without_heads_needs_its_axis_whole(tmp_path: Path) -> None:
    def middle(b: Block, v: ir.Value) -> ir.Value:
        return b.op("com.microsoft.GatedRMSNorm", v, b.w("scale", INNER), v)

    sandwich(through("Identity"), needs=middle).check(tmp_path)


def test_flops() -> None:
    """8 for each token and element of its state, 4 heads of 4 x 6."""
    values = [ir.Value(name=name) for name in "qkv"]
    node = ir.node("LinearAttention", values, domain="com.microsoft", num_outputs=2)
    node.outputs[0].name, node.outputs[1].name = "y", "state"
    shapes = {**dict.fromkeys("qkv", (2, 5, 16)), "y": (2, 5, 24), "state": (2, 4, 4, 6)}
    assert node_flops(node, shapes) == 8 * 2 * 5 * 4 * 4 * 6
