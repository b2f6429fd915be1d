"""Operators of ONNX Runtime's optimizer of diffusion models become ONNX's own, which are split and run anywhere."""

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

CHANNELS = 16
WEIGHTS = {"A": (CHANNELS, 4, 3, 3), "a": (CHANNELS,), "B": (CHANNELS, CHANNELS, 3, 3), "b": (CHANNELS,)}
WEIGHTS |= {"scale": (CHANNELS,), "shift": (CHANNELS,), "G": (CHANNELS, 64), "g": (64,), "H": (32, CHANNELS)}
WEIGHTS |= {"h": (CHANNELS,), "T": (5, CHANNELS)}
HEAD = """<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
    m (float[n, 4, h, w] x, float[n, 5] t) => (float[n, k, c] y)"""
# With channels last: the convolutions' weights are [outputs, height, width, inputs].
FUSED = """
    last = Transpose <perm = [0, 2, 3, 1]> (x)
    first = com.microsoft.NhwcConv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (last, A_last, a)
    active = com.microsoft.GroupNorm <groups = 4, epsilon = 1e-5, activation = 1> (first, scale, shift)
    step = MatMul (t, T)  wide = Unsqueeze (step, middle)
    second = com.microsoft.NhwcConv <kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]> (active, B_last, b)
    norm, sum = com.microsoft.SkipGroupNorm <groups = 4, epsilon = 1e-5, activation = 0> (second, scale, shift, wide, a)
    both = Add (norm, sum)
    tokens = Reshape (both, as_tokens)
    gates = MatMul (tokens, G)  gated = com.microsoft.BiasSplitGelu (gates, g)
    back = MatMul (gated, H)  y = com.microsoft.BiasAdd (back, h, tokens)
"""
PLAIN = """
    first = Conv <pads = [1, 1, 1, 1]> (x, A, a)
    normal = GroupNormalization <num_groups = 4> (first, scale, shift)
    gate = Sigmoid (normal)  active = Mul (normal, gate)
    step = MatMul (t, T)  wide = Unsqueeze (step, ends)
    second = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (active, B, b)
    added = Add (second, wide)  bias = Unsqueeze (a, after)  sum = Add (added, bias)
    norm = GroupNormalization <num_groups = 4> (sum, scale, shift)
    both = Add (norm, sum)
    last = Transpose <perm = [0, 2, 3, 1]> (both)  tokens = Reshape (last, as_tokens)
    product = MatMul (tokens, G)  gates = Add (product, g)
    left, right = Split <axis = -1, num_outputs = 2> (gates)
    gelu = Gelu (right)  gated = Mul (left, gelu)
    projected = MatMul (gated, H)  biased = Add (projected, h)  y = Add (biased, tokens)
"""
LISTS = {"middle": [1, 2], "ends": [2, 3], "after": [1, 2], "as_tokens": [0, -1, CHANNELS]}


def write(path: Path, nodes: str) -> Path:
    model, random = onnx.parser.parse_model(f"{HEAD} {{ {nodes} }}"), np.random.default_rng(0)
    arrays = {name: random.random(shape, np.float32) - 0.5 for name, shape in WEIGHTS.items()}
    arrays |= {f"{name}_last": arrays[name].transpose(0, 2, 3, 1) for name in "AB"}
    arrays |= {name: np.array(numbers) for name, numbers in LISTS.items()}
    read = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in arrays.items() if name in read)
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_operators_with_channels_last_are_split(mode: str, tmp_path: Path) -> None:
    fused, plain = write(tmp_path / "fused.onnx", FUSED), write(tmp_path / "plain.onnx", PLAIN)
    plan = plan_model(fused, ["2xcpu"], Request(split_mode=mode, shapes={"x": (2, 4, 8, 8), "t": (2, 5)}))
    compile_model(plan, tmp_path / "package")  # which compares it with the model in its new form
    random = np.random.default_rng(1)
    feeds = {"x": random.random((3, 4, 6, 10), np.float32), "t": random.random((3, 5), np.float32)}
    with Session(tmp_path / "package", threads=1) as session:
        assert_close(session.run(feeds), run_whole(plain, feeds))
    if mode == "tensor":
        whole = {name for name, size, _ in plan.whole_weights if size > 1024}
        assert whole.isdisjoint({"A_last_channels_first", "B_last_channels_first", "G", "H"})


@pytest.mark.parametrize(
    "node",
    [
        "y = com.microsoft.SkipGroupNorm <groups = 4, epsilon = 1e-5, activation = 0> (x, scale, shift, flat)",
        "y = com.microsoft.GroupNorm <groups = 4, epsilon = 1e-5, activation = 0, channels_last = 0> (x, scale, shift)",
        "y = com.microsoft.BiasSplitGelu (x, flat)",
    ],
)
def test_other_forms_stay(node: str, tmp_path: Path) -> None:
    """Rows for each channel, [n, channels], which Add would not align; images with channels first; computed biases."""
    text = f"""<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
        m (float[n, h, w, 16] x, float[16] flat) => (float[n, i, j, k] y)
        <float[16] scale = {{{",".join("1" * 16)}}}, float[16] shift = {{{",".join("1" * 16)}}}> {{ {node} }}"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    assert [node.domain for node in read_graph(tmp_path / "model.onnx").nodes] == ["com.microsoft"]
