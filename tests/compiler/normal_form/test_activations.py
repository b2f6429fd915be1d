"""Activations inside products, as ONNX Runtime saves them, become nodes of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from tests.conftest import assert_close, run_whole
from tests.helpers.graphs import read_graph

WEIGHTS = {"A": (12, 6, 3, 3), "a": (12,), "B": (6, 12, 1, 1), "C": (6, 8), "c": (8,)}
RELU, TANH = 'activation = "Relu"', 'activation = "Tanh"'
# Of FusedConv, and what is left in its place.
CONVOLUTIONS = {
    RELU: ["Conv", "Relu"],
    'activation = "Sigmoid"': ["Conv", "Sigmoid"],
    'activation = "LeakyRelu", activation_params = [0.3]': ["Conv", "LeakyRelu"],
    'activation = "HardSigmoid", activation_params = [0.1, 0.4]': ["Conv", "HardSigmoid"],
    'activation = "Clip", activation_params = [-0.5, 0.5]': ["Conv", "Clip"],
}
GEMMS = {
    RELU: ["Gemm", "Relu"],
    'activation = "Elu", activation_alpha = 0.5': ["Gemm", "Elu"],
    'activation = "LeakyRelu", activation_alpha = 0.3, alpha = 0.5, beta = 2.0': ["Gemm", "LeakyRelu"],
}


def write(path: Path, nodes: str, opset: int = 17) -> None:
    text = f"""<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]>
        g (float[n, 6, h, h] x) => (float[n, 8] y) {{ {nodes} }}"""
    model, random = onnx.parser.parse_model(text), np.random.default_rng(0)
    for name, shape in WEIGHTS.items():
        model.graph.initializer.append(numpy_helper.from_array(random.random(shape, np.float32) - 0.5, name))
    onnx.save(model, path)


def end(gemm: str) -> str:
    pooled = "pooled = GlobalAveragePool (image)  flat = Flatten (pooled)"
    return f"{pooled}  y = com.microsoft.FusedGemm <{gemm}> (flat, C, c)"


def check(folder: Path, expected: list[str]) -> None:
    """The operators, and the numbers of a package on two devices."""
    model = folder / "model.onnx"
    operators = [node.op_type for node in read_graph(model).graph if node.domain == ""]
    assert [name for name in operators if name not in ("GlobalAveragePool", "Flatten")] == expected
    plan = plan_model(model, ["2xcpu"], Request(split_mode="tensor", shapes={"x": (2, 6, 8, 8)}))
    compile_model(plan, folder / "package", verify=False)
    fed = {"x": np.random.default_rng(1).standard_normal((3, 6, 5, 5)).astype(np.float32)}
    with Session(folder / "package") as session:
        assert_close(session.run(fed), run_whole(model, fed))


@pytest.mark.parametrize("opset", [9, 17])
@pytest.mark.parametrize("how", CONVOLUTIONS)
def test_convolutions(tmp_path: Path, how: str, opset: int) -> None:
    wide = f"wide = com.microsoft.FusedConv <{how}, pads = [1, 1, 1, 1]> (x, A, a)  image = Conv (wide, B)"
    write(tmp_path / "model.onnx", f"{wide}  {end(TANH)}", opset)
    check(tmp_path, [*CONVOLUTIONS[how], "Conv", "Gemm", "Tanh"])


@pytest.mark.parametrize("how", GEMMS)
def test_products(tmp_path: Path, how: str) -> None:
    write(tmp_path / "model.onnx", f"wide = Conv (x, A, a)  image = Conv (wide, B)  {end(how)}")
    check(tmp_path, ["Conv", "Conv", *GEMMS[how]])


def test_an_image_is_added_before_the_activation(tmp_path: Path) -> None:
    wide = "wide = Conv <pads = [1, 1, 1, 1]> (x, A, a)"
    image = 'image = com.microsoft.FusedConv <activation = "Relu"> (wide, B, , x)'
    write(tmp_path / "model.onnx", f"{wide}  {image}  {end(RELU)}")
    check(tmp_path, ["Conv", "Conv", "Add", "Relu", "Gemm", "Relu"])


def test_a_rank_has_a_part_of_the_sum(tmp_path: Path) -> None:
    """Each device has half of both convolutions."""
    wide = 'wide = com.microsoft.FusedConv <activation = "Relu", pads = [1, 1, 1, 1]> (x, A, a)'
    image = 'image = com.microsoft.FusedConv <activation = "Relu"> (wide, B)'
    write(tmp_path / "model.onnx", f"{wide}  {image}  {end(RELU)}")
    plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode="tensor", shapes={"x": (2, 6, 8, 8)}))
    compile_model(plan, tmp_path / "package")
    halves = [onnx.load(tmp_path / "package" / f"rank{rank}" / "stage0.onnx") for rank in (0, 1)]
    for half in halves:
        shapes = [list(tensor.dims) for tensor in half.graph.initializer if len(tensor.dims) == 4]
        assert shapes == [[6, 6, 3, 3], [6, 6, 1, 1]]
