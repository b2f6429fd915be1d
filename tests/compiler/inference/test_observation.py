"""Shapes of operators without a shape function, observed by running them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from splitc.compiler import Request, plan_model
from splitc.compiler.inference.observation import observe, refusal
from splitc.compiler.inference.shapes import infer_shapes
from splitc.compiler.inference.symbolic import RULES
from splitc.compiler.operators.gpu_kernels import LATENT
from splitc.compiler.operators.registry import REGISTRY

INT, FLOAT = ir.DataType.INT64, ir.DataType.FLOAT


def node(
    operator: str,
    *inputs: tuple[Sequence[int | str], ir.DataType],
    domain: str = "com.microsoft",
    outputs: int = 1,
    **attributes: Any,
) -> ir.Node:
    values = [
        ir.Value(name=f"x{number}", shape=ir.Shape(shape), type=ir.TensorType(dtype))
        for number, (shape, dtype) in enumerate(inputs)
    ]
    made = ir.node(operator, values, attributes, domain=domain, num_outputs=outputs)
    for number, value in enumerate(made.outputs):
        value.name = f"y{number}"
    ir.Graph(values, made.outputs, nodes=[made], opset_imports={"": 17, "com.microsoft": 1})
    return made


def observed(made: ir.Node) -> Any:
    """As `observe`: sizes are compared with numbers and with symbols' names."""
    return observe(made)


def test_every_operator_with_a_rule_has_a_shape_function() -> None:
    """Otherwise a model with it is split worse than possible, and planned without its sizes.

    Fusion makes LatentAttention, after shapes are inferred.
    """
    ruled = {name for name, operator in REGISTRY.items() if operator.axes is not None} - {LATENT}
    names = [name.rpartition(".") for name in ruled]
    assert [name for domain, _, name in names if not RULES.has(domain, name)] == []


def test_symbols_and_numbers_of_what_an_operator_makes() -> None:
    inverse = node("Inverse", (["batch", 4, 4], FLOAT))
    assert observed(inverse) == [(("batch", 4, 4), FLOAT)]
    assert observed(node("Inverse", (["batch", 5, 5], FLOAT))) == [(("batch", 5, 5), FLOAT)]
    assert observed(node("Inverse", ([1 << 20, 4, 4], FLOAT))) == [((1 << 20, 4, 4), FLOAT)]  # learned, and not run


def test_sizes_that_follow_from_several_inputs() -> None:
    assert observed(node("FusedMatMul", (["n", 3], FLOAT), ([3, "m"], FLOAT))) == [(("n", "m"), FLOAT)]
    assert observed(node("Concat", (["n", 3], FLOAT), (["m", 3], FLOAT), domain="", axis=0)) == [((None, 3), FLOAT)]
    assert observed(node("Concat", ([2, 3], FLOAT), ([5, 3], FLOAT), domain="", axis=0)) == [((7, 3), FLOAT)]


def test_what_depends_on_data_or_does_not_run_stays_unknown() -> None:
    assert observed(node("Reshape", (["n", 4], FLOAT), ([2], INT), domain="")) is None
    assert observed(node("NonZero", ([3, 4], FLOAT), domain="")) is None
    assert observed(node("Inverse", (["n", 4, 5], FLOAT))) is None


def test_large_inputs_are_not_made() -> None:
    """Images of 1031 pixels, by which sizes are told apart, in a batch of as many would take 12 GiB."""

    def images(count: int) -> ir.Node:
        return node("Concat", ([count, 3, 1033, 1039], FLOAT), ([1, 3, 1033, 1039], FLOAT), domain="", axis=0)

    assert observed(images(2)) == [((3, 3, 1033, 1039), FLOAT)]
    assert observed(images(1031)) is None


def test_plan_says_what_was_observed_and_knows_the_sizes(write_model: Callable[[str], Path]) -> None:
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        agraph (float[n, 4, 4] x) => (float[n, 4, 4] y) {
            a = com.microsoft.Inverse (x)
            b = MatMul (a, x)
            c = com.microsoft.Inverse (b)
            y = MatMul (c, x)
        }"""
    )
    plan = plan_model(path, ["cpu0"], Request(shapes={"x": (3, 4, 4)}))
    assert plan.analysis.costs.shapes["c"] == (3, 4, 4)
    assert not plan.analysis.costs.bound.uncertain
    (warning,) = plan.warnings
    assert "com.microsoft.Inverse" in warning and "observed" in warning


@pytest.mark.parametrize(("bits", "packed"), [(4, 16), (8, 32)])
def test_rows_of_few_bits(bits: int, packed: int) -> None:
    table = ([100, packed], ir.DataType.UINT8)
    gathered = node("GatherBlockQuantized", table, (["n", "t"], INT), ([100, 1], FLOAT), bits=bits, block_size=32)
    model = ir.Model(gathered.graph, ir_version=10)  # type: ignore[arg-type]  # it is in one
    assert infer_shapes(model) == frozenset()
    assert gathered.outputs[0].shape == ir.Shape(["n", "t", 32])


def test_operator_that_is_older_in_onnx_runtime_than_in_onnx(write_model: Callable[[str], Path]) -> None:
    """Models that ONNX Runtime's optimizer has fused have it in ONNX's domain, at any opset."""
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 14]>
        g (float[n, 8] x) => (float[n, 8] y) <float[8] w = {1, 1, 1, 1, 1, 1, 1, 1}>
        { y = LayerNormalization (x, w) }"""
    )
    model = ir.load(path)
    assert infer_shapes(model) == frozenset()
    shape = model.graph.node(0).outputs[0].shape
    assert shape is not None
    assert list(shape) == [ir.SymbolicDim("n"), 8]


@pytest.mark.parametrize("past", [0, 32])
@pytest.mark.parametrize("fill", [np.zeros, np.ones])
def test_lengths_that_are_tried_fit_the_sizes(past: int, fill: Any) -> None:
    """Others are refused, or make ONNX Runtime 1.23 count from below zero without end."""
    caches = [([1, 2, past, 32], FLOAT)] * 2
    lengths = [([1], ir.DataType.INT32), ([], ir.DataType.INT32)]
    sizes = [([1, 4, size], FLOAT) for size in (128, 64, 64)]
    attention = node("GroupQueryAttention", *sizes, *caches, *lengths, outputs=3, num_heads=4, kv_num_heads=2)
    shapes = [tuple(shape) for shape, _ in (*sizes, *caches, *lengths)]
    for made in ((), [None, (1, 2, past + 4, 32), (1, 2, past + 4, 32)], [None, (1, 2, 1, 32), None]):
        assert refusal(attention, shapes, (fill,), made) is None
