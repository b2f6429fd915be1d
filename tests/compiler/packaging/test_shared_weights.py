"""Weights that sessions share: ONNX Runtime rewrites some of its own, and takes the given one in their place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
import pytest

from splitc.compiler.packaging.shared_weights import is_left_alone
from tests.conftest import Arrays
from tests.helpers.blocks import Block

# All axes are of one size: where sizes differ, a weight in the wrong layout is an error and no wrong result.
SIZE = 6
Array = npt.NDArray[Any]
Middle = Callable[[Block, ir.Value], ir.Value]


def through(operator: str, *shape: int) -> Middle:
    return lambda b, x: b.op(operator, x, b.w("W", *shape))


def behind(operator: str, *shape: int) -> Middle:
    """The weight is the first input."""
    return lambda b, x: b.op(operator, b.w("W", *shape), x)


def dequantized(b: Block, x: ir.Value, turned: bool = False) -> ir.Value:
    weight = b.weight("W", ir.tensor(np.random.default_rng(0).integers(-9, 9, (SIZE, SIZE), np.int8)))
    scale, zero = b.constant(np.full(SIZE, 0.1, np.float32), np.float32), b.constant(np.zeros(SIZE, np.int8), np.int8)
    real = b.op("DequantizeLinear", weight, scale, zero, axis=0)
    return b.op("MatMul", x, b.op("Transpose", real, perm=[1, 0]) if turned else real)


def added_dequantized(b: Block, x: ir.Value) -> ir.Value:
    weight = b.weight("W", ir.tensor(np.random.default_rng(0).integers(-9, 9, (SIZE, SIZE), np.int8)))
    return b.op("Add", x, b.op("DequantizeLinear", weight, b.constant(0.1, np.float32), b.constant(0, np.int8)))


def looked_up(b: Block, x: ir.Value) -> ir.Value:
    return b.op("Add", x, b.op("Gather", b.w("W", SIZE, SIZE), b.ints(*range(SIZE)), axis=0))


def chosen(b: Block, x: ir.Value) -> ir.Value:
    return b.op("Where", b.op("Greater", x, b.constant(0.0, np.float32)), x, b.w("W", SIZE, SIZE))


# What stands between two Transposes, and whether its weight may be shared.
LEFT_ALONE: dict[str, Middle] = {
    "MatMul": through("MatMul", SIZE, SIZE),
    "MatMul of three axes": through("MatMul", SIZE, SIZE, SIZE),
    "MatMul from the left": behind("MatMul", SIZE, SIZE, SIZE),
    "LayerNormalization": through("LayerNormalization", SIZE),
    "Gather": looked_up,
    "DequantizeLinear": dequantized,
    "Conv": through("Conv", SIZE, SIZE, 1),
    "ConvTranspose": through("ConvTranspose", SIZE, SIZE, 1),
    "InstanceNormalization": lambda b, x: b.op("InstanceNormalization", x, b.w("W", SIZE), b.w("W", SIZE)),
}
REWRITTEN: dict[str, Middle] = {
    **{name: through(name, SIZE, SIZE) for name in ("Add", "Mul", "Sub", "Div", "Max", "Min", "PRelu")},
    "Add of a vector": through("Add", SIZE),
    "Where": chosen,
    "Concat": lambda b, x: b.op("Concat", x, b.w("W", SIZE, SIZE, SIZE), axis=1),
    "Add of what is dequantized": added_dequantized,
}
# Not shared, though ONNX Runtime may leave it alone.
CAREFUL: dict[str, Middle] = {"Transpose of what is dequantized": partial(dequantized, turned=True)}


def graph_of(middle: Middle) -> Block:
    b = Block(opset=17)
    x = b.op("Transpose", b.data("x", (SIZE, SIZE, SIZE)), perm=[0, 2, 1])
    b.give(b.op("Transpose", middle(b, x), perm=[0, 2, 1]))
    return b


def run_with(model: ir.Model, feeds: Arrays, given: Arrays) -> Array:
    """The result of a session that is given these weights."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in given.items()}
    for name, value in values.items():
        options.add_initializer(name, value)
    content = ir.serde.serialize_model(model).SerializeToString()
    session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    result: Array = session.run(None, feeds)[0]
    return result


def error_if_shared(model: ir.Model, feeds: Arrays) -> float:
    weight = model.graph.initializers["W"].const_value
    assert weight is not None
    alone, shared = run_with(model, feeds, {}), run_with(model, feeds, {"W": weight.numpy()})
    return float(np.abs(alone - shared).max())


@pytest.mark.parametrize("name", [*LEFT_ALONE, *REWRITTEN, *CAREFUL])
def test_weights_that_may_be_rewritten_are_not_shared(name: str) -> None:
    b = graph_of({**LEFT_ALONE, **REWRITTEN, **CAREFUL}[name])
    model = b.model()
    assert is_left_alone(model.graph.initializers["W"]) == (name in LEFT_ALONE)
    if name in LEFT_ALONE:
        assert error_if_shared(model, b.feeds) == 0


def test_shared_weights_that_are_rewritten_give_wrong_results() -> None:
    """If ONNX Runtime does not do this any more, all weights may be shared."""
    blocks = {name: graph_of(middle) for name, middle in REWRITTEN.items()}
    errors = {name: error_if_shared(b.model(), b.feeds) for name, b in blocks.items()}
    assert [name for name, error in errors.items() if error < 0.1] == []
