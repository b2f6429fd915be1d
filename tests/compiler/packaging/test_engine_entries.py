"""Weights that sessions share: ONNX Runtime rewrites some weights, and then ignores the shared one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
import pytest

from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.packaging.engine_entries import is_left_alone, written_fields
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.package.products import Product
from tests.conftest import LAYER, Arrays
from tests.helpers.blocks import Block
from tests.helpers.mixtures import mixture
from tests.helpers.needs import need_experts

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


def normalized(b: Block, x: ir.Value) -> ir.Value:
    """ONNX Runtime fuses each with the weight before it."""
    ones = (b.constant(np.linspace(0.5, 2, SIZE, dtype=np.float32), np.float32) for _ in range(4))
    return b.op("BatchNormalization", x, *ones)


def scaled(b: Block, x: ir.Value, axes: int = 1) -> ir.Value:
    factors = np.linspace(0.5, 2, SIZE, dtype=np.float32).reshape(-1, *[1] * (axes - 1))
    return b.op("Add", b.op("Mul", x, b.constant(factors, np.float32)), b.constant(factors + 1, np.float32))


def convolved(b: Block, x: ir.Value) -> ir.Value:
    return b.op("Conv", x, b.w("W", SIZE, SIZE, 1))


def multiplied(b: Block, x: ir.Value) -> ir.Value:
    return b.op("MatMul", x, b.w("W", SIZE, SIZE))


def compared(operator: str) -> Middle:
    return lambda b, x: b.op("Cast", b.op(operator, x, b.w("W", SIZE, SIZE)), to=1)


def both(operator: str) -> Middle:
    """A logical operator."""

    def middle(b: Block, x: ir.Value) -> ir.Value:
        weight = b.weight("W", ir.tensor(np.tri(SIZE, dtype=np.bool_)))
        return b.op("Cast", b.op(operator, b.op("Greater", x, b.constant(0.0, np.float32)), weight), to=1)

    return middle


def of_whole_numbers(operator: str, kind: int, **attributes: Any) -> Middle:
    def middle(b: Block, x: ir.Value) -> ir.Value:
        dtype = np.uint32 if kind == ir.DataType.UINT32 else np.int64
        weight = b.weight("W", ir.tensor(np.arange(1, 1 + SIZE * SIZE).reshape(SIZE, SIZE).astype(dtype) % 7 + 1))
        whole = b.op("Cast", b.op("Mul", b.op("Abs", x), b.constant(100.0, np.float32)), to=kind)
        return b.op("Cast", b.op(operator, whole, weight, **attributes), to=1)

    return middle


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
    "a bias of Conv": lambda b, x: b.op("Conv", x, b.w("B", SIZE, SIZE, 1), b.w("W", SIZE)),
    "Conv before BatchNormalization": lambda b, x: normalized(b, convolved(b, x)),
    "Conv before Mul and Add": lambda b, x: scaled(b, convolved(b, x), 2),
    "MatMul before BatchNormalization": lambda b, x: normalized(b, multiplied(b, x)),
    "MatMul before Mul and Add": lambda b, x: scaled(b, multiplied(b, x)),
    "InstanceNormalization": lambda b, x: b.op("InstanceNormalization", x, b.w("W", SIZE), b.w("W", SIZE)),
}
REWRITTEN: dict[str, Middle] = {
    **{name: through(name, SIZE, SIZE) for name in ("Add", "Mul", "Sub", "Div", "Max", "Min", "PRelu")},
    **{f"{name} from the left": behind(name, SIZE, SIZE) for name in ("Add", "Mul", "Sub", "Div", "Pow")},
    **{name: through(name, SIZE, SIZE) for name in ("Mean", "Sum")},
    **{name: compared(name) for name in ("Greater", "GreaterOrEqual", "Less", "LessOrEqual")},
    **{name: both(name) for name in ("And", "Or", "Xor", "Equal")},
    "Mod": of_whole_numbers("Mod", ir.DataType.INT64),
    "BitShift": of_whole_numbers("BitShift", ir.DataType.UINT32, direction="RIGHT"),
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
    """The outputs of a session with these shared weights."""
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
    """If ONNX Runtime no longer does this, all weights may be shared."""
    blocks = {name: graph_of(middle) for name, middle in REWRITTEN.items()}
    errors = {name: error_if_shared(b.model(), b.feeds) for name, b in blocks.items()}
    assert [name for name, error in errors.items() if error < 0.1] == []


def test_package_has_only_those_shared_that_may_be(tmp_path: Path) -> None:
    b = Block(opset=17)
    x = b.op("Transpose", b.data("x", (64, 64)), perm=[1, 0])
    added = b.op("Add", b.op("MatMul", x, b.w("M", 64, 64)), b.w("W", 64, 64))
    b.give(b.op("Transpose", added, perm=[1, 0]), shape=[64, 64])
    save(b.model(), tmp_path / "model.onnx")
    compile_model(plan_model(tmp_path / "model.onnx", ["cpu0"], LAYER), tmp_path / "package")
    (engine,) = read_manifest(tmp_path / "package").ranks[0].engines
    assert engine.weights is not None
    assert [weight.name for weight in engine.weights] == ["M"]


@pytest.mark.parametrize(("device", "shares"), [("cpu0", True), ("cuda0", False)])
def test_weights_that_gpus_copy_are_no_session_s_to_share(device: str, shares: bool, tmp_path: Path) -> None:
    """QMoE's kernel has another layout: the session's own weights are freed, and shared ones would be held beside."""
    need_experts("quantized")
    save(mixture("quantized").model(), tmp_path / "model.onnx")
    request = Request(split_mode="layer", engine="onnxruntime", memory=("1GiB",))
    compile_model(plan_model(tmp_path / "model.onnx", [device], request), tmp_path / "package", verify=False)
    (engine,) = read_manifest(tmp_path / "package").ranks[0].engines
    assert (engine.weights is not None) == shares


def test_products_of_any_number_of_rows_are_listed() -> None:
    """Once each, as the weight is stored; only for GPUs."""
    b = Block(opset=17)
    x = b.data("x", (3, 4), ["n", 4])
    wide = b.op("MatMul", b.op("MatMul", x, b.w("W", 4, 8)), b.w("V", 8, 4))
    again = b.op("Gemm", b.op("MatMul", wide, b.w("again", 4, 8)), b.w("T", 6, 8), b.w("bias", 6), transB=1)
    fixed = b.op("MatMul", b.data("fixed", (3, 6)), b.w("F", 6, 6))
    b.give(
        b.op("Concat", b.op("MatMul", again, b.op("Transpose", again, perm=[1, 0])), b.op("Identity", fixed), axis=1)
    )
    graph = b.model().graph
    assert written_fields(graph, on_gpu=True)["products"] == [
        Product(4, 8, "float32"),
        Product(8, 4, "float32"),
        Product(8, 6, "float32", transposed=True),
    ]
    assert written_fields(graph, on_gpu=False)["products"] == []
