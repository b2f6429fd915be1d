"""Scratch memory of kernels, compared with ONNX Runtime's own count."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from models.writer import Writer, save
from splitc.compiler.operators.registry import REGISTRY
from tests.helpers.needs import needs_later_operators

Case = tuple[str, str, list[tuple[int, ...] | None], Mapping[str, Any]]
B, S, N, D = 2, 512, 8, 64
ROWS = (B, S, N * D)
CASES: list[Case] = [
    ("com.microsoft", "MultiHeadAttention", [ROWS, ROWS, ROWS], {"num_heads": N}),
    ("com.microsoft", "MultiHeadAttention", [ROWS, (B, N, S, D), (B, N, S, D)], {"num_heads": N}),
    ("com.microsoft", "MultiHeadAttention", [ROWS, ROWS, ROWS, None, None, (1, 1, S, S)], {"num_heads": N}),
    ("com.microsoft", "Attention", [ROWS, (N * D, 3 * N * D), (3 * N * D,)], {"num_heads": N}),
    ("", "Attention", [(B, N, S, D)] * 3, {}),
    ("com.microsoft", "FastGelu", [ROWS], {}),
    ("com.microsoft", "FastGelu", [ROWS, (N * D,)], {}),
    ("com.microsoft", "BiasGelu", [ROWS, (N * D,)], {}),
    ("", "Where", [ROWS, (1,), ROWS], {}),
    ("", "Where", [(1, 1, N * D), (1,), ROWS], {}),
    ("", "ConvTranspose", [(1, 64, 32, 32), (64, 32, 4, 4)], {"strides": [2, 2], "pads": [1] * 4}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1]}{len(case[2])}{len(case[2][-1] or ())}")
def test_scratch_is_what_the_kernel_allocates(tmp_path: Path, case: Case) -> None:
    domain, operator, shapes, attributes = case
    w = Writer(23)
    types = [ir.DataType.BOOL if operator == "Where" and not n else ir.DataType.FLOAT for n in range(len(shapes))]
    inputs = [None if s is None else w.input(f"x{n}", types[n], s) for n, s in enumerate(shapes)]
    name = f"{domain}.{operator}" if domain else operator
    made = w.op(name, *inputs, **attributes)
    w.output(made, "y", ir.DataType.FLOAT, [f"axis{n}" for n in range(len(shapes[0] or ()))])
    feeds = {f"x{n}": np.zeros(shape, types[n].numpy()) for n, shape in enumerate(shapes) if shape is not None}
    result, allocated = run_counted(w, feeds, tmp_path)
    node = next(node for node in ir.load(tmp_path / "model.onnx").graph if node.op_type == operator)
    scratch = REGISTRY[name].scratch
    assert scratch is not None
    predicted = 4 * sum(scratch(node, [shape or () for shape in shapes], [result.shape]))
    assert 0.95 * allocated <= predicted <= 1.1 * allocated + (1 << 20) * (operator == "MultiHeadAttention")


def run_counted(w: Writer, feeds: Mapping[str, Any], folder: Path) -> tuple[Any, int]:
    """A model's outputs, and the bytes that its kernels allocated."""
    save(w.model(), folder / "model.onnx")
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.collect_node_memory_stats_to_file", str(folder / "stats.csv"))
    session = ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    (result,) = session.run(None, feeds)
    del session  # which writes the statistics
    rows = list(csv.reader((folder / "stats.csv").open()))[1:]
    return result, sum(int(row[4]) for row in rows)


@needs_later_operators
@pytest.mark.parametrize("asked", [{}, {"causal": 0}, {"softcap": 5.0}])
def test_scores_of_grouped_queries(tmp_path: Path, asked: Mapping[str, Any]) -> None:
    """All scores are allocated if the flash kernel does not support the request."""
    w, shapes = Writer(21), [ROWS, (B, S, 2 * D), (B, S, 2 * D), (B, 2, 0, D), (B, 2, 0, D), (B,), (1,)]
    types = [ir.DataType.FLOAT] * 5 + [ir.DataType.INT32] * 2
    inputs = [w.input(f"x{number}", *own) for number, own in enumerate(zip(types, shapes, strict=True))]
    how = {"num_heads": N, "kv_num_heads": 2, **asked}
    made, *_ = w.ops("com.microsoft.GroupQueryAttention", *inputs, outputs=3, **how)
    w.output(made, "y", ir.DataType.FLOAT, list(ROWS))
    feeds = {f"x{n}": np.zeros(shape, kind.numpy()) for n, (kind, shape) in enumerate(zip(types, shapes, strict=True))}
    feeds["x5"][:], feeds["x6"][:] = S - 1, S
    _, allocated = run_counted(w, feeds, tmp_path)
    node, scratch = made.producer(), REGISTRY["com.microsoft.GroupQueryAttention"].scratch
    assert node is not None and scratch is not None
    predicted = 4 * sum(scratch(node, shapes, [ROWS, (B, 2, S, D), (B, 2, S, D)]))
    assert 0.95 * allocated <= predicted <= allocated + (1 << 20)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("operator", ["GRU", "LSTM", "RNN"])
def test_scratch_of_recurrent_networks(tmp_path: Path, operator: str, kept: int, direction: str) -> None:
    """Also if only the last states are asked for, so that the node has no first output."""
    data, hidden, directions = (64, 5, 37), 96, 2 if direction == "bidirectional" else 1
    gates = {"GRU": 3, "LSTM": 4, "RNN": 1}[operator] * hidden
    w, shapes = Writer(17), [data, (directions, gates, data[-1]), (directions, gates, hidden)]
    weights = [w.constant(np.zeros(shape), np.float32) for shape in shapes[1:]]
    x = w.input("x", ir.DataType.FLOAT, data)
    made = w.ops(operator, x, *weights, outputs=2, hidden_size=hidden, direction=direction)
    made[1 - kept].name = ""
    w.output(made[kept], "y", ir.DataType.FLOAT, ["?"] * (4 - kept))
    result, allocated = run_counted(w, {"x": np.zeros(data, np.float32)}, tmp_path)
    node, scratch = made[0].producer(), REGISTRY[operator].scratch
    assert node is not None and scratch is not None
    predicted = 4 * sum(scratch(node, shapes, [() if kept else result.shape]))
    assert allocated <= predicted <= 1.05 * allocated


PADDED = {"pads": [1] * 4}
# Image and kernel. ONNX Runtime has the channels last where they are whole blocks, of unsigned numbers.
CONVOLUTIONS: list[tuple[tuple[int, ...], tuple[int, ...], Mapping[str, Any]]] = [
    ((2, 64, 32, 40), (96, 64, 3, 3), PADDED),
    ((1, 64, 32, 40), (96, 64, 1, 1), {}),
    ((1, 64, 32, 40), (96, 64, 1, 1), {"strides": [2, 2]}),
    ((1, 3, 32, 40), (96, 3, 3, 3), PADDED),
    ((1, 64, 32, 40), (96, 16, 3, 3), {"group": 4, **PADDED}),
    ((1, 64, 32, 40), (64, 1, 3, 3), {"group": 64, **PADDED}),
    ((1, 17, 32, 40), (17, 1, 3, 3), {"group": 17, **PADDED}),
    ((1, 64, 400), (96, 64, 3), {"pads": [1, 1]}),
]


@pytest.mark.parametrize(
    ("operator", "dtype"),
    [("ConvInteger", ir.DataType.UINT8), ("QLinearConv", ir.DataType.UINT8), ("QLinearConv", ir.DataType.INT8)],
)
@pytest.mark.parametrize(("image", "kernel", "attributes"), CONVOLUTIONS)
def test_scratch_of_convolutions_of_whole_numbers(
    image: tuple[int, ...],
    kernel: tuple[int, ...],
    attributes: Mapping[str, Any],
    operator: str,
    dtype: ir.DataType,
    tmp_path: Path,
) -> None:
    w, quantizes = Writer(17), operator == "QLinearConv"
    x, scale, zero = w.input("x", dtype, image), w.constant(0.1, np.float32), w.constant(3, dtype.numpy())
    weight = w.weight("w", ir.tensor(np.ones(kernel, np.int8 if quantizes else np.uint8)))
    inputs = [x, scale, zero, weight, scale, w.constant(0, np.int8), scale, zero] if quantizes else [x, weight]
    made = w.op(operator, *inputs, **attributes)
    w.output(made, "y", dtype if quantizes else ir.DataType.INT32, ["?"] * len(image))
    result, allocated = run_counted(w, {"x": np.zeros(image, dtype.numpy())}, tmp_path)
    node, scratch = made.producer(), REGISTRY[operator].scratch
    assert node is not None and scratch is not None
    shapes = [tuple(value.shape.numpy()) if value is not None and value.shape else () for value in node.inputs]
    predicted = result.itemsize * sum(scratch(node, shapes, [result.shape]))
    turned = max(np.prod(image), result.size) if quantizes and dtype == ir.DataType.UINT8 else 0
    assert allocated <= predicted <= allocated + turned


@pytest.mark.parametrize(
    ("channels", "groups"), [((43, 40), 1), ((43, 42), 1), ((43, 4), 1), ((40, 1), 40), ((64, 16), 2), ((40, 16), 2)]
)
def test_weights_of_convolutions_are_in_whole_blocks_of_channels(
    tmp_path: Path, channels: tuple[int, int], groups: int
) -> None:
    """As in ONNX Runtime's optimized model. Blocks are smaller on machines without AVX-512."""
    w, kernel = Writer(17), (*channels, 3, 3)
    image, made = (1, kernel[1] * groups, 8, 8), (1, kernel[0], 6, 6)
    weight = w.weight("weight", ir.tensor(np.ones(kernel, np.float32)))
    w.output(w.op("Conv", w.input("x", ir.DataType.FLOAT, image), weight, group=groups), "y", ir.DataType.FLOAT, made)
    model = w.model()
    save(model, tmp_path / "model.onnx")
    options = ort.SessionOptions()
    options.log_severity_level, options.optimized_model_filepath = 3, str(tmp_path / "optimized.onnx")
    ort.InferenceSession(tmp_path / "model.onnx", options, providers=["CPUExecutionProvider"])
    (held,) = ir.load(tmp_path / "optimized.onnx").graph.initializers.values()
    (node,) = model.graph
    padding = REGISTRY["Conv"].padding
    assert padding is not None
    assert held.const_value is not None
    sizes = held.const_value.numpy().shape
    predicted = np.prod(kernel) + (padding(node, [image, kernel], [made]) or 0)
    assert np.prod(sizes) == predicted or (np.prod(sizes) < predicted and any(size % 16 for size in sizes[:2]))
