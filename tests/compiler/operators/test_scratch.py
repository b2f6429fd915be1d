"""What kernels allocate while they run, against ONNX Runtime's own count."""

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
    save(w.model(), tmp_path / "model.onnx")
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.collect_node_memory_stats_to_file", str(tmp_path / "stats.csv"))
    session = ort.InferenceSession(tmp_path / "model.onnx", options, providers=["CPUExecutionProvider"])
    feeds = {f"x{n}": np.zeros(shape, types[n].numpy()) for n, shape in enumerate(shapes) if shape is not None}
    (result,) = session.run(None, feeds)
    del session  # which writes the statistics
    rows = list(csv.reader((tmp_path / "stats.csv").open()))[1:]
    allocated = sum(int(row[4]) for row in rows)
    node = next(node for node in ir.load(tmp_path / "model.onnx").graph if node.op_type == operator)
    scratch = REGISTRY[name].scratch
    assert scratch is not None
    predicted = 4 * scratch(node, [shape or () for shape in shapes], [result.shape])
    assert 0.95 * allocated <= predicted <= 1.1 * allocated + (1 << 20) * (operator == "MultiHeadAttention")


@pytest.mark.parametrize(
    ("channels", "groups"), [((43, 40), 1), ((43, 42), 1), ((43, 4), 1), ((40, 1), 40), ((64, 16), 2), ((40, 16), 2)]
)
def test_weights_of_convolutions_are_in_whole_blocks_of_channels(
    tmp_path: Path, channels: tuple[int, int], groups: int
) -> None:
    """As ONNX Runtime's optimized model has them. Its blocks are smaller where the machine lacks AVX-512."""
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
    predicted = np.prod(kernel) + padding(node, [image, kernel], [made])
    assert np.prod(sizes) == predicted or (np.prod(sizes) < predicted and sizes[0] % 16)
