"""What engines for GPUs fuse takes no time of its own in predictions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

from splitc.compiler import Request, plan_model
from splitc.compiler.engine_graphs.gpu_fusions import fused_away
from splitc.compiler.modes.auto import predict
from splitc.runtime.hardware.machine import known_machine

TEXT = """
<ir_version: 10, opset_import: ["" : 21]> m (float16[batch, 16, 64, 64] x) => (float16[batch, 16, 64, 64] y) {
    norm = GroupNormalization <num_groups = 4> (x, scale, shift)  gate = Sigmoid (norm)  active = Mul (norm, gate)
    moved = Conv <pads = [1, 1, 1, 1]> (active, weight, bias)  y = Add (moved, x)
}
"""


def test_nodes_of_one_operator_take_time_once(tmp_path: Path) -> None:
    model, random = onnx.parser.parse_model(TEXT), np.random.default_rng(0)
    for name, shape in {"scale": (16,), "shift": (16,), "weight": (16, 16, 3, 3), "bias": (16,)}.items():
        array = random.standard_normal(shape).astype(np.float16)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(model, tmp_path / "model.onnx")
    with_fusion, without = (
        plan_model(
            tmp_path / "model.onnx",
            ["cuda0"],
            Request(split_mode="layer", shapes={"x": (2, 16, 64, 64)}, no_fuse=no_fuse),
        )
        for no_fuse in (False, True)
    )
    analysis = with_fusion.analysis
    gone = fused_away(analysis.graph, analysis.costs.bound.shapes)
    assert [node.op_type for node in analysis.graph.nodes if node in gone] == ["Sigmoid"]
    seconds = [predict(plan, known_machine(), None).latency for plan in (with_fusion, without)]
    assert seconds[0] < seconds[1]
