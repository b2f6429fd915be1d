"""Images in blocks of channels, against what ONNX Runtime's profile says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.passes.common import ShapeInferencePass

from models.writer import Writer, save
from splitc.compiler.execution.exchange import EngineGraph
from splitc.compiler.execution.optimized import optimize
from splitc.compiler.operators.operator import Shapes
from tests.helpers.graphs import read_graph
from tests.helpers.in_use import BYTES, assert_bytes_are_those_in_use
from tests.helpers.needs import needs_later_operators
from tests.helpers.profiles import named, profile, reads

SHAPE = (1, 16, 96, BYTES // (4 * 16 * 96))
FEEDS = {"x": np.ones(SHAPE, np.float32)}
INTO, OUT_OF = "ReorderInput", "ReorderOutput"


def shapes(node: ir.Node) -> tuple[Shapes, Shapes]:
    def own(value: ir.Value | None) -> tuple[int, ...]:
        stored = value.const_value if value is not None else None
        return SHAPE if stored is None else tuple(stored.shape.numpy())

    return [own(value) for value in node.inputs], [own(value) for value in node.outputs]


class Images:
    """Writes nodes on images of SHAPE."""

    def __init__(self, known: bool) -> None:
        self.w = Writer(opset=17)
        sizes: list[int | str] = list(SHAPE) if known else ["n", 16, "h", "w"]
        self.x = self.w.input("x", ir.DataType.FLOAT, sizes)
        self.sizes, self.count = sizes, 0

    def numbers(self, *shape: int) -> ir.Value:
        self.count += 1
        return self.w.weight(f"weight{self.count}", ir.tensor(np.full(shape, 0.01, np.float32)))

    def conv(self, image: ir.Value, groups: int = 1, pads: int = 1) -> ir.Value:
        weight, bias = self.numbers(16, 16 // groups, 3, 3), self.numbers(16)
        return self.w.op("Conv", image, weight, bias, pads=[pads] * 4, group=groups)

    def norm(self, image: ir.Value) -> ir.Value:
        return self.w.op("BatchNormalization", image, *(self.numbers(16) for _ in range(4)))

    def residual(self) -> ir.Value:
        first = self.w.op("Relu", self.conv(self.x))
        return self.w.op("Relu", self.w.op("Add", self.conv(self.w.op("Relu", self.conv(first))), first))

    def silu(self, image: ir.Value) -> ir.Value:
        return self.w.op("Mul", image, self.w.op("Sigmoid", image))

    def turned(self) -> ir.Value:
        """The copy into blocks takes channels that are last."""
        last = self.w.op("CumSum", self.w.op("Transpose", self.x, perm=[0, 2, 3, 1]), self.w.constant(3, np.int64))
        return self.conv(self.w.op("Transpose", last, perm=[0, 3, 1, 2]))

    def padded(self) -> ir.Value:
        sizes = self.w.weight("sizes", ir.tensor(np.array([0, 0, 1, 1] * 2)))
        return self.conv(self.w.op("Pad", self.x, sizes), pads=0)


CASES: dict[str, tuple[Callable[[Images], ir.Value], list[str]]] = {
    "one": (lambda i: i.conv(i.x), [INTO, "Conv", OUT_OF]),
    "depthwise": (lambda i: i.conv(i.conv(i.x), groups=16), [INTO, "Conv", "Conv", OUT_OF]),
    "activated": (lambda i: i.conv(i.w.op("Relu", i.conv(i.x))), [INTO, "Conv", "Conv", OUT_OF]),
    "scaled": (lambda i: i.w.op("Mul", i.norm(i.conv(i.x)), i.numbers(16, 1, 1)), [INTO, "Conv", OUT_OF]),
    "residual": (Images.residual, [INTO, "Conv", "Conv", "Conv", OUT_OF]),
    "silu": (lambda i: i.conv(i.silu(i.conv(i.x))), [INTO, "Conv", "QuickGelu", "Conv", OUT_OF]),
    "silu alone": (lambda i: i.w.op("Elu", i.silu(i.w.op("Elu", i.x))), ["Elu", "QuickGelu", "Elu"]),
    "copied": (
        lambda i: i.conv(i.w.op("Softplus", i.conv(i.x))),
        [*[INTO, "Conv", OUT_OF, "Softplus"], INTO, "Conv", OUT_OF],
    ),
    "padded": (Images.padded, [INTO, "Conv", OUT_OF]),
    "pool": (
        lambda i: i.w.op("MaxPool", i.conv(i.x), kernel_shape=[3, 3], pads=[1] * 4),
        [INTO, "Conv", "MaxPool", OUT_OF],
    ),
    "last": (lambda i: i.w.op("Transpose", i.conv(i.x), perm=[0, 2, 3, 1]), [INTO, "Conv", OUT_OF]),
    "first": (Images.turned, ["Transpose", "CumSum", INTO, "Conv", OUT_OF]),
    "norm": (
        lambda i: i.conv(i.norm(i.w.op("Relu", i.conv(i.x)))),
        [INTO, "Conv", "Conv", "Conv", OUT_OF],
    ),
}


@needs_later_operators
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_images_stay_in_blocks(tmp_path: Path, case: str, known: bool) -> None:
    """Until a node reads them that has no kernel for blocks: then they are copied."""
    write, kernels = CASES[case]
    images = Images(known)
    sizes = [images.sizes[place] for place in ((0, 2, 3, 1) if case == "last" else range(4))]
    images.w.output(write(images), "y", ir.DataType.FLOAT, sizes)
    assert_bytes_are_those_in_use(images.w, FEEDS, tmp_path, kernels, shapes, in_order=case == "first")


def test_sums_of_images_whose_sizes_are_unknown_are_apart(tmp_path: Path) -> None:
    """A convolution takes in the other image only where ONNX Runtime knows that both are of one size."""
    for known, middle in ((True, []), (False, ["Reshape", "Reshape", "Add", "Reshape"])):
        images = Images(known)
        images.w.output(
            images.w.op("Add", images.conv(images.x), images.conv(images.x)), "y", ir.DataType.FLOAT, images.sizes
        )
        ran = [INTO, "Conv", *middle[:1], "Conv", *middle[1:], OUT_OF]
        assert_bytes_are_those_in_use(images.w, FEEDS, tmp_path, ran, shapes)


def inferred(node: ir.Node) -> tuple[Shapes, Shapes]:
    """The shapes that the file has; () where a value has none."""

    def own(value: ir.Value | None) -> tuple[int, ...]:
        shape = value.shape if value is not None else None
        return tuple(shape.numpy()) if shape is not None and shape.is_static() else ()

    return [own(value) for value in node.inputs], [own(value) for value in node.outputs]


def resized(images: Images, places: str, sizes: bool = False) -> ir.Value:
    """Twice as high and three times as wide, as scales or as sizes say."""
    w, image = images.w, images.conv(images.x)
    scales = w.weight("scales", ir.tensor(np.array([1, 1, 2, 3], np.float32)))
    wanted = w.weight("wanted", ir.tensor(np.array([1, 16, 2 * SHAPE[2], 3 * SHAPE[3]])))
    asked = {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": places}
    return w.op("Resize", image, None, *((None, wanted) if sizes else (scales,)), **asked)


@pytest.mark.parametrize(
    ("write", "kernels"),
    [
        (lambda i: i.w.op("Concat", i.conv(i.x), i.conv(i.x), axis=1), [INTO, "Conv", "Conv", "Concat", OUT_OF]),
        (lambda i: i.w.op("GlobalAveragePool", i.conv(i.x)), [INTO, "Conv", "GlobalAveragePool", OUT_OF]),
        (lambda i: resized(i, "asymmetric"), [INTO, "Conv", "Upsample", OUT_OF]),
        (lambda i: resized(i, "asymmetric", sizes=True), [INTO, "Conv", "Upsample", OUT_OF]),
        (lambda i: resized(i, "half_pixel"), [INTO, "Conv", OUT_OF, "Resize"]),
    ],
    ids=["joined", "global pool", "enlarged", "enlarged to sizes", "enlarged without a kernel for blocks"],
)
def test_images_of_other_sizes_stay_in_blocks(
    tmp_path: Path, write: Callable[[Images], ir.Value], kernels: list[str]
) -> None:
    images = Images(known=True)
    images.w.output(images.w.op("Elu", write(images)), "y", ir.DataType.FLOAT, ["n", "c", "h", "w"])
    save(ShapeInferencePass()(named(images.w.model())).model, tmp_path / "model.onnx")
    events = profile(tmp_path / "model.onnx", FEEDS, tmp_path, optimized=True)
    assert [event["args"]["op_name"] for event in events] == [*kernels, "Elu"]
    graph = read_graph(tmp_path / "model.onnx")
    own = EngineGraph(graph.nodes, reads, lambda value: BYTES, frozenset(graph.graph.outputs), shapes=inferred)
    ours = [node.op_type.replace("Resize", "Upsample") for node in optimize(own, overwrites=True).order]
    assert sorted(ours) == sorted(kernel.replace("Resize", "Upsample") for kernel in [*kernels, "Elu"])
