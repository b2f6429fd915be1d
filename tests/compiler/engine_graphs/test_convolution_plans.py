"""Convolutions for which cuDNN's heuristics may have no plan are recognized."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import pytest

from splitc.compiler.engine_graphs.convolution_plans import may_lack_plan
from splitc.compiler.packaging.engine_entries import written_fields


def convolution(
    weight: Sequence[int | str] | None,
    groups: int,
    dtype: ir.DataType = ir.DataType.FLOAT16,
    operator: tuple[str, str] = ("", "Conv"),
) -> ir.Graph:
    inputs = [ir.val("x", dtype), ir.val("weight", dtype, weight)]
    node = ir.node(operator[1], inputs, {"group": groups}, domain=operator[0])
    return ir.Graph(inputs, node.outputs, nodes=[node], name="convolution")


TRANSPOSED, LAST = ("", "ConvTranspose"), ("com.microsoft", "NhwcConv")


@pytest.mark.parametrize(
    ("weight", "groups", "operator", "expected"),
    [
        ([1024, 64, 128], 16, ("", "Conv"), True),  # wav2vec 2.0's positions
        ([768, 48, 19], 16, ("", "Conv"), False),  # data2vec's
        ([1024, 1024, 32], 1, ("", "Conv"), True),
        ([256, 256, 7, 7], 1, ("", "Conv"), True),
        ([256, 7, 7, 256], 1, LAST, True),
        ([640, 3, 3, 2560], 1, LAST, False),
        ([768, 3, 32, 32], 1, ("", "Conv"), False),  # patches
        ([1280, 3, 2, 14, 14], 1, ("", "Conv"), False),
        ([512, 512, 3, 3, 3], 1, ("", "Conv"), False),  # a video's decoder
        ([256, 1, 31, 31], 256, ("", "Conv"), False),  # depthwise
        ([768, 1, 6], 256, ("", "Conv"), True),
        ([1024, 256, 1, 1, 1], 4, ("", "Conv"), True),
        ([512, 256, 16], 1, TRANSPOSED, False),  # a vocoder's
        ([384, 384, 33], 1, TRANSPOSED, True),
        ([1536, 128, 13], 12, TRANSPOSED, True),
        ([512, 1, 4, 4], 512, TRANSPOSED, False),
        (["outputs", 64, 3, 3], 1, ("", "Conv"), True),
        (None, 1, ("", "Conv"), True),
    ],
)
def test_by_the_weights_sizes(
    weight: list[int | str] | None, groups: int, operator: tuple[str, str], expected: bool
) -> None:
    graph = convolution(weight, groups, operator=operator)
    assert may_lack_plan(graph) == expected
    assert written_fields(graph, on_gpu=True)["tries_plans"] == expected
    assert not written_fields(graph, on_gpu=False)["tries_plans"]


def test_single_precision_has_plans() -> None:
    assert not may_lack_plan(convolution([1024, 64, 128], 16, ir.DataType.FLOAT))
    assert may_lack_plan(convolution([1024, 64, 128], 16, ir.DataType.BFLOAT16))
