"""What is between dequantized and quantized values, against what ONNX Runtime's profile says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.passes.common import ShapeInferencePass

from models.writer import Writer, save
from splitc.compiler.execution.exchange import EngineGraph
from splitc.compiler.execution.fused import fuse
from splitc.compiler.execution.quantized import repacked_weights
from splitc.compiler.operators.scratch import between_integers
from tests.helpers.graphs import read_graph
from tests.helpers.needs import needs_later_operators
from tests.helpers.profiles import named, profile, reads

FLOAT = ir.DataType.FLOAT


class Quantized:
    """Writes nodes on dequantized values."""

    def __init__(self) -> None:
        self.w, self.generator = Writer(opset=21), np.random.default_rng(0)

    def dequantized(self, value: ir.Value, zero: np.generic) -> ir.Value:
        w = self.w
        return w.op("DequantizeLinear", value, w.constant(0.1, np.float32), w.constant(zero, zero.dtype))

    def weight(self, name: str, *shape: int) -> ir.Value:
        tensor = ir.tensor(self.generator.integers(-9, 9, shape).astype(np.int8))
        return self.dequantized(self.w.weight(name, tensor), np.int8(0))

    def rounded(self, value: ir.Value, zero_point: int = 3) -> ir.Value:
        w, zero = self.w, np.uint8(zero_point)
        steps = w.constant(0.1, np.float32), w.constant(zero, np.uint8)
        return self.dequantized(w.op("QuantizeLinear", value, *steps), zero)


def kernels_of(folder: Path, w: Writer, feeds: dict[str, np.ndarray]) -> tuple[list[str], list[str]]:
    """The nodes that ONNX Runtime runs, without those that move images, and those of the replay, in order."""
    save(ShapeInferencePass()(named(w.model())).model, folder / "model.onnx")
    events = profile(folder / "model.onnx", feeds, folder, optimized=True)
    names = [event["name"].removesuffix("_kernel_time").split("_token")[0] for event in events]
    graph = read_graph(folder / "model.onnx")
    fused = fuse(EngineGraph(graph.nodes, reads, lambda value: 1, frozenset(graph.graph.outputs), graph.are_alike))
    ours = [fused.integers.get(node, node).name or "" for node in fused.nodes.order]
    return [name for name in names if name.startswith("node")], ours


@pytest.mark.parametrize("zero_point", [0, 3])
def test_dequantized_data_are_computed_in_integers(tmp_path: Path, zero_point: int) -> None:
    """Sums, views and products, the last of which gives singles, are a node each.

    So is a convolution with a Relu if the least number is zero anyway.
    """
    q = Quantized()
    w = q.w
    image = q.rounded(w.input("x", FLOAT, ["n", 3, 32, 32]))
    image = q.rounded(w.op("Relu", w.op("Conv", image, q.weight("kernel", 16, 3, 3, 3))), zero_point)
    image = q.rounded(w.op("Add", image, q.rounded(w.op("Sigmoid", image))))
    flat = q.rounded(w.op("Reshape", image, w.constant([-1, 900], np.int64)))
    product = q.rounded(w.op("MatMul", flat, q.weight("first", 900, 64)))
    w.output(w.op("MatMul", product, q.weight("second", 64, 8)), "y", FLOAT, ["m", 8])
    theirs, ours = kernels_of(tmp_path, w, {"x": np.ones((2, 3, 32, 32), np.float32)})
    assert sorted(ours) == sorted(theirs) and len(ours) == (7 if zero_point == 0 else 10)


@pytest.mark.parametrize(("most", "implied"), [(None, True), (30.0, True), (6.0, False)])
def test_bounds_that_the_type_implies_are_no_node(tmp_path: Path, most: float | None, implied: bool) -> None:
    """Bytes with a zero point of 0 and a scale of 0.1 lie from 0 to 25.5."""
    q = Quantized()
    w = q.w
    image = w.op("Conv", q.rounded(w.input("x", FLOAT, ["n", 3, 32, 32])), q.weight("kernel", 16, 3, 3, 3))
    bounds = [w.constant(bound, np.float32) for bound in (0.0, most) if bound is not None]
    w.output(q.rounded(w.op("Clip", image, *bounds), 0), "y", FLOAT, ["n", 16, 30, 30])
    theirs, ours = kernels_of(tmp_path, w, {"x": np.ones((2, 3, 32, 32), np.float32)})
    assert sorted(ours) == sorted(theirs) and len(ours) == (3 if implied else 6)


def test_what_no_kernel_computes_in_integers_is_dequantized(tmp_path: Path) -> None:
    q = Quantized()
    image = q.w.op("Erf", q.rounded(q.w.input("x", FLOAT, ["n", 64])))
    q.w.output(q.w.op("MatMul", image, q.weight("weight", 64, 8)), "y", FLOAT, ["n", 8])
    theirs, ours = kernels_of(tmp_path, q.w, {"x": np.ones((2, 64), np.float32)})
    assert [name for name in ours if name in theirs] == theirs and len(ours) == 5


@pytest.mark.parametrize(("channels", "bytes_"), [(16, (8 * 9 * 900,)), (12, (4 * 12 * 900, 4 * 9 * 900))])
def test_bytes_of_a_convolution_in_integers(channels: int, bytes_: tuple[int, ...]) -> None:
    """Addresses where a kernel quantizes as it goes, else sums of 32 bits and columns."""
    q = Quantized()
    image = q.rounded(q.w.op("Relu", q.w.input("x", FLOAT, [2, 4, 32, 32])))
    made = q.w.op("Conv", image, q.weight("kernel", channels, 4, 3, 3))
    node = made.producer()
    assert node is not None
    for maker in [value.producer() for value in node.inputs[:2] if value is not None]:
        assert maker is not None and maker.inputs[0] is not None
        maker.inputs[0].dtype = maker.inputs[0].dtype or ir.DataType.UINT8
    assert between_integers(node, [(2, 4, 32, 32), (channels, 4, 3, 3)], [(2, channels, 30, 30)]) == bytes_


@needs_later_operators
def test_products_read_their_weights_quantized(tmp_path: Path) -> None:
    """Though their data are not: but none with a scale for each row, and none with scales that others have too."""
    w = Writer(opset=21)
    x = w.input("x", FLOAT, [2, 64])

    def weight(name: str, scales: str, axis: int) -> ir.Value:
        own = [w.weight(name, ir.tensor(np.ones((64, 64), np.int8))), shared.get(scales)]
        own[1] = own[1] or shared.setdefault(scales, w.weight(scales, ir.tensor(np.full(64, len(shared), np.float32))))
        return w.op("DequantizeLinear", *own, axis=axis)

    shared: dict[str, ir.Value] = {}
    weights = [weight("A", "a", 1), weight("B", "b", 0), weight("C", "c", 1), weight("D", "c", 1)]
    products = [w.op("MatMul", x, each) for each in weights]
    for number, product in enumerate(products):
        w.output(product, f"y{number}", FLOAT, [2, 64])
    kernels, ours = kernels_of(tmp_path, w, {"x": np.ones((2, 64), np.float32)})
    assert sorted(kernels) == sorted(ours) and len(ours) == 7
    made = repacked_weights([product.producer() for product in products])  # type: ignore[misc]
    assert [weight.name for weight in made.values()] == ["A"]
