"""Attention whose bias may have rows of any length is recognized."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from splitc.compiler.engine_graphs.unaligned_bias import adds_unaligned_bias
from splitc.compiler.graphs.origins import note_sizes

MULTI_HEAD = "com.microsoft", "MultiHeadAttention", 5


def attends(sizes: list[int | str] | None, kind: tuple[str, str, int] = MULTI_HEAD, biased: bool = True) -> ir.Graph:
    domain, name, place = kind
    bias = ir.val("bias", ir.DataType.FLOAT16, sizes)
    inputs = [*(ir.val(name, ir.DataType.FLOAT16) for name in "qkv"), *[None] * (place - 3)]
    node = ir.node(name, [*inputs, bias] if biased else inputs, domain=domain)
    return ir.Graph([value for value in inputs if value is not None], node.outputs, nodes=[node])


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (["b", 1, "length", "length"], False),
        ([1, 1, "length", 80], False),
        ([1, 1, "length", 77], True),
        ([1, 1, 64, "length"], True),
        (["b", 8, "length", "others"], True),
        ([1, 1, "length", "length + past"], True),
        (None, True),
    ],
)
@pytest.mark.parametrize("kind", [MULTI_HEAD, ("", "Attention", 3)])
def test_rows_of_any_length(sizes: list[int | str] | None, expected: bool, kind: tuple[str, str, int]) -> None:
    assert adds_unaligned_bias(attends(sizes, kind)) == expected


def test_without_a_bias_nothing_is_unaligned() -> None:
    assert not adds_unaligned_bias(attends(None, biased=False))
    assert not adds_unaligned_bias(ir.Graph([], [], nodes=[ir.node("Relu", [ir.val("x")])]))


def test_sizes_are_those_of_the_rank() -> None:
    graph = attends([1, 8, 64, 80])
    bias = graph[0].inputs[5]
    assert bias is not None
    note_sizes(bias, ir.Shape([1, 8, 64, 20]))
    assert adds_unaligned_bias(graph)
