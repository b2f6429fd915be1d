"""Transposed convolutions are padded evenly for GPUs, and compute the same."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

from splitc.compiler.engine_graphs.gpu_sizes import keep_on_gpu
from splitc.compiler.operators.gpu_kernels import has_gpu_kernel

SIZES = list(itertools.product(("SAME_UPPER", "SAME_LOWER"), (2, 3, 4), (1, 2, 3), (0, 1), (1, 2)))


def run(model: onnx.ModelProto) -> np.ndarray:
    """The output for an image of 5 x 7."""
    options = ort.SessionOptions()
    options.log_severity_level = 3  # onnx counts other sizes for kernels that are shorter than their strides
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    image = np.random.default_rng(0).standard_normal((2, 3, 5, 7), np.float32)
    made: np.ndarray = session.run(None, {"x": image})[0]
    return made


def written(attributes: str, opset: int = 17, image: str = "2, 3, 5, 7", kernel: tuple[int, int] = (3, 3)) -> ir.Model:
    head = f'<ir_version: 8, opset_import: ["" : {opset}]>'
    body = f"y = ConvTranspose <{attributes}> (x, w, b)"
    model = onnx.parser.parse_model(f"{head} g (float[{image}] x) => (float[n, c, h, w] y) {{ {body} }}")
    generator = np.random.default_rng(1)
    for name, shape in (("w", (3, 4, *kernel)), ("b", (4,))):
        array = generator.standard_normal(shape, np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return ir.from_proto(model)


def assert_is_even(model: ir.Model) -> None:
    """The node has the same numbers at both ends, and the model's output is the same to the bit."""
    expected = run(ir.to_proto(model))
    keep_on_gpu(model.graph, {})
    (node,) = (node for node in model.graph if node.op_type == "ConvTranspose")
    assert has_gpu_kernel(node, ir.DataType.FLOAT)
    assert node.attributes.get_string("auto_pad", "NOTSET") == "NOTSET" and "output_shape" not in node.attributes
    np.testing.assert_array_equal(run(ir.to_proto(model)), expected)


@pytest.mark.parametrize("opset", [9, 17, 22])
@pytest.mark.parametrize("pads", [(0, 0, 1, 1), (1, 0, 0, 2), (1, 0, 1, 0)])
def test_numbers_that_differ_are_sliced_off(pads: tuple[int, ...], opset: int) -> None:
    model = written(f"pads = {list(pads)}, strides = [2, 3], output_padding = [0, 1]", opset)
    assert_is_even(model)
    assert len(model.graph) == (1 if pads[:2] == pads[2:] else 2)


@pytest.mark.parametrize("image", ["2, 3, 5, 7", "n, 3, h, w"])
def test_pads_that_the_sizes_decide_are_computed(image: str) -> None:
    evened = 0
    for kind, size, stride, more, dilation in SIZES:
        if more < stride:
            given = f"strides = [{stride}, 2], output_padding = [{more}, 0], dilations = [{dilation}, 1]"
            model = written(f'{given}, auto_pad = "{kind}"', image=image, kernel=(size, 3))
            assert_is_even(model)
            evened += len(model.graph) == 2
    assert evened > 20


@pytest.mark.parametrize("kind", ["NOTSET", "SAME_UPPER", "SAME_LOWER"])
def test_wanted_sizes_are_kept(kind: str) -> None:
    wanted = f'strides = [2, 2], output_shape = [10, 15], auto_pad = "{kind}"'
    assert_is_even(written(wanted))
    model = written(wanted, image="n, 3, h, w")
    keep_on_gpu(model.graph, {})
    assert len(model.graph) == 1, "the pads depend on sizes"
