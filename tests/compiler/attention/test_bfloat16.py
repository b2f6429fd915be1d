"""Decoders in bfloat16 have the engines for GPUs that those in float16 have, whose numbers are compared elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from models.llama import Size, build
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.engine_graphs import fused_rows
from splitc.compiler.engine_graphs.cpu_values import why_not_captured
from splitc.compiler.engine_graphs.gpu_sizes import keep_on_gpu
from splitc.compiler.lowering.communication import HALF
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.requests.added_feeds import length_feeds
from splitc.runtime.requests.preamble import PreambleEngine
from tests.helpers.needs import needs_caches


def compiled(dtype: ir.DataType, devices: Sequence[str], folder: Path) -> Path:
    """The package of a small decoder."""
    size = Size(layers=2, hidden=64, heads=4, kv_heads=2, feed_forward=128, vocabulary=96, dtype=dtype)
    save(build(size), folder / "model.onnx")
    request = Request(split_mode="tensor" if len(devices) > 1 else "layer", memory=["1GiB"])
    compile_model(plan_model(folder / "model.onnx", devices, request), folder / "package", verify=False)
    return folder / "package"


def operators_of(package: Path) -> Counter[str]:
    """How often each operator is in the first rank's engine."""
    names = [node.op_type for node in onnx.load(package / "rank0/stage0.onnx").graph.node]
    return Counter("Rows" if name.startswith("Rows") else name.removesuffix(HALF) for name in names)


@needs_caches
@pytest.mark.parametrize("devices", [["cuda0"], ["cuda0", "cuda1"]], ids=len)
def test_a_decoder_is_fused_as_in_float16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: Sequence[str]
) -> None:
    monkeypatch.setattr(fused_rows, "LEAST", 0)
    made = [
        operators_of(compiled(dtype, devices, tmp_path / dtype.name))
        for dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    ]
    assert made[0] == made[1]
    assert made[1]["GroupQueryAttention"] == 2 and made[1]["Rows"] > 0


@needs_caches
def test_masks_are_computed_on_the_cpu(tmp_path: Path) -> None:
    """With a hidden token, so that engines need the mask. ONNX Runtime has no Where for bfloat16 on CPUs."""
    package = compiled(ir.DataType.BFLOAT16, ["cuda0"], tmp_path)
    manifest = read_manifest(package)
    assert manifest.preamble is not None
    engine = PreambleEngine(package, manifest.preamble, manifest.lengths)
    feeds: dict[str, Any] = {
        "input_ids": np.array([[5, 6, 7]]),
        "attention_mask": np.array([[0, 1, 1, 1, 1]]),
        "position_ids": np.array([[1, 2, 3]]),
    }
    feeds |= length_feeds(manifest.lengths, 1, {one.input: 2 for one in manifest.lengths}, feeds)
    ((mask, _),) = manifest.preamble.masks.items()
    (made,) = [array for name, array in engine.apply(feeds).items() if name == mask]
    seen = np.tri(3, 5, 2, np.bool_)
    seen[:, 0] = False
    assert made.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(np.asarray(made)[0, 0, :, :5] == 0, seen)


@pytest.mark.parametrize(
    ("node", "casts"),
    [
        ("y = Reciprocal (x)", 2),
        ("y = Sqrt (x)", 0),
        ("y = Less (x, x)", 2),
        ("y = Pad (x, pads)", 2),
        ("y = Unique (x)", 0),
    ],
)
def test_what_has_no_kernel_is_computed_in_single_precision(node: str, casts: int) -> None:
    """Without casts ONNX Runtime would not load the graph. Unique has no kernel for any type."""
    kind = "bool" if "Less" in node else "bfloat16"
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]> g (bfloat16[4, 8] x) => ({kind}[n, m] y)
        <int64[4] pads = {{0, 1, 0, 1}}> {{ {node} }}"""
    )
    graph = ir.from_proto(model).graph
    keep_on_gpu(graph, {})
    assert [node.op_type for node in graph].count("Cast") == casts
    assert (why_not_captured(graph) == "") == ("Unique" not in node)
    if casts:
        onnx.checker.check_model(ir.to_proto(ir.Model(graph, ir_version=10)), full_check=True)
