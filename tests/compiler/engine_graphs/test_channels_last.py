"""Group norms and convolutions have their channels last in engines for GPUs, and the same numbers on CPU devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.engine_graphs import channels_last
from splitc.runtime import Session
from tests.conftest import run_whole

CHANNELS, GROUPS = 16, 4
INSTANCES = """
    grouped = Reshape (x, groups)  normal = InstanceNormalization (grouped, ones, zeros)
    back = Reshape (normal, {shape})  scaled = Mul ({scale}, back)  norm = Add (scaled, {shift})
"""
BY_SIZES = "sizes = Shape (x)" + INSTANCES.format(shape="sizes", scale="scale", shift="shift")
STATED = INSTANCES.format(shape="whole", scale="scale", shift="shift")
UNSQUEEZED = "wide = Unsqueeze (vector, last)  wider = Unsqueeze (vector2, last) sizes = Shape (x)" + INSTANCES.format(
    shape="sizes", scale="wide", shift="wider"
)
OPERATOR = f"norm = GroupNormalization <num_groups = {GROUPS}> (x, vector, vector2)"
SILU = "gate = Sigmoid (norm)  active = Mul (norm, gate)"
BARE = "active = Identity (norm)"
CONV = "y = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (active, weight, bias)"
NO_BIAS = "y = Conv <dilations = [2, 2]> (active, weight)"
FEW = "y = Conv (active, few, three)"
FUNCTIONS = "splitc.on.gpu"


def weights(groups: int = GROUPS) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "groups": np.array([0, groups, -1]),
        "whole": np.array([2, CHANNELS, 6, 6]),
        "last": np.array([1, 2]),
        "ones": np.ones(groups),
        "zeros": np.zeros(groups),
        "scale": random.standard_normal((CHANNELS, 1, 1)),
        "row": random.standard_normal(6),
        "shift": random.standard_normal((1, CHANNELS, 1, 1)),
        "vector": random.standard_normal(CHANNELS),
        "vector2": random.standard_normal(CHANNELS),
        "weight": random.standard_normal((2 * CHANNELS, CHANNELS, 3, 3)) / 8,
        "bias": random.standard_normal(2 * CHANNELS),
        "few": random.standard_normal((3, CHANNELS, 1, 1)),
        "three": random.standard_normal(3),
        "none": np.array([0]),
        "six_channels": np.array([6]),
        "second": np.array([1]),
        "narrow": random.standard_normal((8, 6, 1, 1)),
        "by_group": random.standard_normal((2 * CHANNELS, CHANNELS // 2, 3, 3)),
    }


def engine(
    body: str, folder: Path, dtype: str = "float16", groups: int = GROUPS, verify: bool = True, **options: Any
) -> list[ir.Node]:
    """The nodes of the engine for one GPU."""
    batch = "2" if "whole" in body else "batch"
    head = f"m ({dtype}[{batch}, {CHANNELS}, 6, 6] x) => ({dtype}[{batch}, c, h, w] y)"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {head} {{ {body} }}')
    read = {name for node in model.graph.node for name in node.input}
    for name, array in weights(groups).items():
        if name in read:
            kind = array.dtype if array.dtype == np.int64 else np.dtype("float32" if dtype == "float" else dtype)
            model.graph.initializer.append(numpy_helper.from_array(array.astype(kind), name))
    onnx.save(model, folder / "model.onnx")
    request = Request(split_mode="layer", shapes={"x": (2, CHANNELS, 6, 6)}, **options)
    compile_model(plan_model(folder / "model.onnx", ["cuda0"], request), folder / "package", verify=verify)
    return list(ir.load(folder / "package/rank0/stage0.onnx").graph)


def called(nodes: list[ir.Node]) -> list[str]:
    return [node.op_type for node in nodes if node.domain == FUNCTIONS]


# Each norm with each convolution, and each of both with each activation.
@pytest.mark.parametrize(
    ("norm", "activation", "convolution"),
    [
        (norm, (SILU, BARE)[(one + other) % 2], convolution)
        for one, norm in enumerate((BY_SIZES, STATED, UNSQUEEZED, OPERATOR))
        for other, convolution in enumerate((CONV, NO_BIAS, FEW))
    ],
)
def test_each_form_has_channels_last(tmp_path: Path, norm: str, activation: str, convolution: str) -> None:
    nodes = engine(f"{norm}  {activation}  {convolution}", tmp_path, verify=False)
    assert called(nodes) == ["GroupNorm", "NhwcConv"]
    (made,) = (node for node in nodes if node.op_type == "GroupNorm")
    assert made.attributes.get_int("activation") == (activation == SILU)
    inputs = {"x": np.random.default_rng(1).standard_normal((2, CHANNELS, 6, 6)).astype(np.float16)}
    with Session(tmp_path / "package", devices=["cpu0"]) as session:
        outputs = session.run(inputs)["y"].astype(np.float32)
    expected = run_whole(tmp_path / "model.onnx", inputs)["y"].astype(np.float32)
    np.testing.assert_allclose(outputs, expected, rtol=0, atol=4e-3 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("body", "options"),
    [
        (f"{BY_SIZES} {SILU} {CONV}", {"dtype": "float"}),
        (f"{BY_SIZES} {SILU} {CONV}", {"groups": CHANNELS}),
        (f"{BY_SIZES} {SILU} {CONV}", {"no_fuse": True}),
        (f"{BY_SIZES.replace('(scale, back)', '(row, back)')} {SILU} {CONV}", {}),
        ("active = Relu (x)  " + CONV, {}),
    ],
    ids=["single precision", "one channel a group", "without fusion", "a scale by columns", "no norm"],
)
def test_others_stay(tmp_path: Path, body: str, options: dict[str, object]) -> None:
    assert not called(engine(body, tmp_path, **options))  # type: ignore[arg-type]


def test_images_with_more_numbers_than_the_kernel_counts_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for most, calls in ((CHANNELS * 36, ["GroupNorm", "NhwcConv"]), (CHANNELS * 36 - 1, [])):
        monkeypatch.setattr(channels_last, "MOST_NUMBERS", most)
        (folder := tmp_path / str(most)).mkdir()
        assert called(engine(f"{BY_SIZES} {SILU} {CONV}", folder)) == calls


def test_a_norm_that_is_read_before_its_gate_keeps_the_gate(tmp_path: Path) -> None:
    nodes = engine(f"{BY_SIZES} {SILU} both = Add (norm, active)  y = Relu (both)", tmp_path)
    (made,) = (node for node in nodes if node.op_type == "GroupNorm")
    assert made.attributes.get_int("activation") == 0


def test_few_results_are_computed_with_others_that_are_cut_off(tmp_path: Path) -> None:
    nodes = engine(f"{BY_SIZES} {SILU} {FEW}", tmp_path)
    (made,) = (node for node in nodes if node.op_type == "NhwcConv")
    assert made.inputs[1] is not None and made.inputs[1].shape == (8, 1, 1, CHANNELS)
    assert [node.op_type for node in made.outputs[0].consumers()] == ["Slice"]


@pytest.mark.parametrize(
    "convolution",
    [
        "y = Conv <group = 2> (active, by_group)",
        "six = Slice (active, none, six_channels, second)  y = Conv (six, narrow)",
    ],
    ids=["groups of channels", "few channels"],
)
def test_other_convolutions_stay(tmp_path: Path, convolution: str) -> None:
    assert called(engine(f"{BY_SIZES} {SILU} {convolution}", tmp_path)) == ["GroupNorm"]
