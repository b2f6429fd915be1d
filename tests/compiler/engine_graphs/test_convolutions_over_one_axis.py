"""On GPUs, convolutions over one axis are written so that cuDNN has a plan for them, and a fast one."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

from splitc.compiler.engine_graphs.gpu_sizes import keep_on_gpu

FRAMES = 90


def written(operator: str, weight: tuple[int, ...], attributes: str, dtype: str = "float", opset: int = 17) -> ir.Model:
    """A convolution, with a bias, of frames."""
    groups = int(attributes.split("group = ")[1].split(",")[0])
    channels = weight[0] if operator == "ConvTranspose" else weight[1] * groups
    given = f"{dtype}[2, {channels}, {FRAMES}{', 40' * (len(weight) - 3)}] x"
    head = f'<ir_version: 8, opset_import: ["" : {opset}]>'
    text = f"{head} g ({given}) => ({dtype}[a, b, c] y) {{ y = {operator} <{attributes}> (x, w) }}"
    model = onnx.parser.parse_model(text.replace("[a, b, c]", "[a, b, c, d]" if len(weight) > 3 else "[a, b, c]"))
    array = np.random.default_rng(1).standard_normal(weight).astype("f2" if dtype == "float16" else "f4")
    model.graph.initializer.append(onnx.numpy_helper.from_array(array, "w"))
    return ir.from_proto(model)


def run(model: ir.Model) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"])
    given = session.get_inputs()[0]
    data = np.random.default_rng(0).standard_normal(given.shape).astype("f2" if "16" in given.type else "f4")
    made: np.ndarray = session.run(None, {"x": data})[0]
    return made


@pytest.mark.parametrize("opset", [11, 17, 22])
@pytest.mark.parametrize(
    "attributes",
    [
        "group = 8, kernel_shape = [31], pads = [15, 15]",
        "group = 8, pads = [3, 0], strides = [2], dilations = [2]",
        'group = 8, auto_pad = "SAME_LOWER", strides = [2]',
    ],
)
def test_depthwise_ones_have_their_axis_last(attributes: str, opset: int) -> None:
    model = written("Conv", (8, 1, 31), attributes, opset=opset)
    expected = run(model)
    keep_on_gpu(model.graph, {})
    (node,) = (node for node in model.graph if node.op_type == "Conv")
    assert [len(value.shape or ()) for value in node.inputs if value is not None] == [4, 4]
    np.testing.assert_allclose(run(model), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("weight", [(16, 1, 5), (8, 8, 5), (8, 1, 5, 5)])
def test_others_keep_their_axes(weight: tuple[int, ...]) -> None:
    model = written("Conv", weight, f"group = {8 // weight[1]}, strides = {[1] * (len(weight) - 2)}")
    keep_on_gpu(model.graph, {})
    assert [node.op_type for node in model.graph] == ["Conv"]


@pytest.mark.parametrize(
    ("operator", "weight", "attributes", "expected"),
    [
        ("Conv", (64, 16, 64), "group = 4, pads = [32, 32]", True),  # positions of an encoder of speech
        ("Conv", (16, 16, 7), "group = 1, pads = [27, 27], dilations = [9]", True),  # an audio codec
        ("ConvTranspose", (16, 16, 33), "group = 1, strides = [4]", True),
        ("Conv", (16, 16, 7), "group = 1, pads = [9, 9], dilations = [3]", False),
        ("Conv", (16, 16, 30), "group = 1, pads = [9, 9]", False),
        ("Conv", (16, 1, 64), "group = 16, pads = [9, 9]", False),
        ("Conv", (16, 3, 32, 32), "group = 1, strides = [32, 32]", False),  # patches of an image
    ],
)
def test_wide_ones_of_halves_are_computed_in_single_precision(
    operator: str, weight: tuple[int, ...], attributes: str, expected: bool
) -> None:
    model = written(operator, weight, attributes, "float16")
    reference = run(model).astype("f4")
    keep_on_gpu(model.graph, {})
    (node,) = (node for node in model.graph if node.op_type == operator)
    data = node.inputs[0]
    assert data is not None and (data.dtype == ir.DataType.FLOAT) == expected
    made = run(model)
    assert made.dtype == np.float16
    np.testing.assert_allclose(made.astype("f4"), reference, rtol=0, atol=2e-2 * float(np.abs(reference).max()))
    plain = written(operator, weight, attributes)
    keep_on_gpu(plain.graph, {})
    assert "Cast" not in {node.op_type for node in plain.graph}
