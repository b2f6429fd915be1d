"""Models of bfloat16 run on CPU devices, in float32 between casts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

from models.llama import Size, build
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.arrays.ort_values import run_on_arrays
from splitc.runtime.engines.onnxruntime_cpu import open_session
from splitc.runtime.engines.widened import in_float32
from tests.conftest import run_whole

# Of each kind of node that is not simply computed in float32.
TEXT = """<ir_version: 10, opset_import: ["" : 21, "own" : 1]>
m ({t}[2, 4] x, int64[2] ids, bool flag) => ({t}[2, 4] y, {t}[2, 4] z, {t}[2, 4] same, {t}[4] kept, float[2, 4] wide)
{{
    row = Gather (table, ids)
    scaled = Mul (row, w)
    half = Constant <value = {t}[1] {{0}}> ()
    one = ConstantOfShape <value = {t}[1] {{0}}> (two)
    y = If (flag) <
        then_branch = g () => ({t}[2, 4] a) {{ b = Mul (x, w)  a = Add (b, row) }},
        else_branch = g () => ({t}[2, 4] c) {{ c = Mul (scaled, half) }}
    >
    wide = Cast <to = 1> (scaled)
    narrow = Cast <to = {code}> (wide)
    most = Max (narrow, x)
    sum = own.Both (most, one)
    z = Where (flag, sum, row)
    same = Identity (x)
    kept = Identity (w)
}}
<domain: "own", opset_import: ["" : 21]>
Both (p, q) => (r) {{ s = Cast <to = {code}> (q)  r = Add (p, s) }}
"""


def model(dtype: str) -> onnx.ModelProto:
    code = {"bfloat16": onnx.TensorProto.BFLOAT16, "float": onnx.TensorProto.FLOAT}[dtype]
    made = onnx.parser.parse_model(TEXT.format(t=dtype, code=code))
    kind = onnx.helper.tensor_dtype_to_np_dtype(code)
    for node in made.graph.node:
        if node.op_type in ("Constant", "ConstantOfShape"):  # the parser reads no numbers of bfloat16
            number = np.array([0.5 if node.op_type == "Constant" else 1], kind)
            node.attribute[0].t.CopyFrom(onnx.numpy_helper.from_array(number))
    weights = {"w": np.arange(1, 5, dtype=kind), "table": np.arange(12, dtype=np.float32).reshape(3, 4).astype(kind)}
    for name, array in {**weights, "two": np.array([2, 4])}.items():
        made.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return made


@pytest.mark.parametrize("flag", [True, False])
def test_all_nodes_are_computed_in_float32(tmp_path: Path, flag: bool) -> None:
    onnx.save(model("bfloat16"), tmp_path / "model.onnx")
    session = open_session(tmp_path / "model.onnx", 1)
    plain = ort.InferenceSession(model("float").SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.arange(8, dtype=np.float32).reshape(2, 4) - 3
    feeds = {"ids": np.array([2, 0]), "flag": np.array(flag)}
    results = run_on_arrays(session, None, {"x": x.astype(ml_dtypes.bfloat16), **feeds})
    expected = plain.run(None, {"x": x, **feeds})
    types = [np.dtype(ml_dtypes.bfloat16)] * 4 + [np.dtype(np.float32)]
    assert [array.dtype for array in results] == types
    for one, other in zip(results, expected, strict=True):
        np.testing.assert_array_equal(one.astype(np.float32), other)  # of numbers that bfloat16 holds


def test_an_output_may_be_listed_twice(tmp_path: Path) -> None:
    made = model("bfloat16")
    made.graph.output.append(made.graph.output[0])
    onnx.save(made, tmp_path / "model.onnx")
    feeds = {"x": np.ones((2, 4), ml_dtypes.bfloat16), "ids": np.array([2, 0]), "flag": np.array(True)}
    first, *_, last = run_on_arrays(open_session(tmp_path / "model.onnx", 1), None, feeds)
    np.testing.assert_array_equal(first, last)


def test_tables_are_looked_up_as_they_are() -> None:
    """Else ONNX Runtime would read the whole table, and keep it in float32."""
    content = in_float32(model("bfloat16").SerializeToString())
    assert content is not None
    nodes = onnx.load_from_string(content).graph.node
    assert [list(node.input) for node in nodes if "table" in node.input] == [["table", "ids"]]
    assert not any(name == "table/float32" for node in nodes for name in node.output)


def test_what_ranks_exchange_stays_bfloat16() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21, "splitc" : 1]>
    m (bfloat16[4] x, uint8[1] first) => (bfloat16[4] y) <bfloat16[4] part> {
        part = Add (x, x)  whole, token = splitc.AllReduce (part, first)  y = Mul (whole, x)
    }"""
    made = onnx.parser.parse_model(text)
    made.graph.value_info.append(onnx.helper.make_tensor_value_info("whole", onnx.TensorProto.BFLOAT16, [4]))
    content = in_float32(made.SerializeToString())
    assert content is not None
    nodes = list(onnx.load_from_string(content).graph.node)
    place = next(n for n, node in enumerate(nodes) if node.op_type == "AllReduce")
    before, exchange, after = nodes[place - 1 : place + 2]
    assert (before.op_type, before.attribute[0].i) == ("Cast", onnx.TensorProto.BFLOAT16)
    assert (after.op_type, after.attribute[0].i) == ("Cast", onnx.TensorProto.FLOAT)
    assert list(before.output) == list(exchange.input)[:1] and list(after.input) == list(exchange.output)[:1]


def test_other_models_stay() -> None:
    assert in_float32(model("float").SerializeToString()) is None


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same decoder in bfloat16 and in float32."""
    folder = tmp_path_factory.mktemp("decoders")
    for name, dtype in (("narrow", ir.DataType.BFLOAT16), ("wide", ir.DataType.FLOAT)):
        save(
            build(Size(layers=2, hidden=64, heads=4, kv_heads=2, feed_forward=96, vocabulary=96, dtype=dtype)),
            folder / f"{name}.onnx",
        )
    return {name: folder / f"{name}.onnx" for name in ("narrow", "wide")}


@pytest.mark.parametrize("mode", ["layer", "row", "tensor"])
def test_a_decoder_runs_on_cpu_devices(decoders: dict[str, Path], tmp_path: Path, mode: str) -> None:
    said: list[str] = []
    request = Request(split_mode=mode, row_min=16) if mode == "row" else Request(split_mode=mode)
    plan = plan_model(decoders["narrow"], ["2xcpu"], request)
    compile_model(plan, tmp_path / "package", say=said.append, warn=said.append)
    assert mode == "layer" or "agree with the unsplit model on cpu0" in said[-1]
    check(tmp_path / "package", decoders["wide"], None)


def test_a_package_for_gpus_runs_on_cpu_devices(decoders: dict[str, Path], tmp_path: Path) -> None:
    """With fused operators, and caches in place. So it is compared as it is compiled, on machines without GPUs too."""
    said: list[str] = []
    request = Request(split_mode="tensor", memory=["1GiB"])
    plan = plan_model(decoders["narrow"], ["cuda0", "cuda1"], request)
    compile_model(plan, tmp_path / "package", say=said.append, warn=said.append)
    assert any("agree with the unsplit model on cpu0" in line for line in said), said
    check(tmp_path / "package", decoders["wide"], ["cpu0", "cpu1"])


def check(package: Path, wide: Path, devices: list[str] | None) -> None:
    """Compare a package with the decoder in float32: a prompt and two tokens of a sequence."""
    with Session(package, devices=devices) as session, session.start(16) as sequence:
        past: dict[str, Any] = {state.input: np.zeros((1, 2, 0, 16), np.float32) for state in session.manifest.states}
        for before, tokens in ((0, 5), (5, 1), (6, 1)):
            feeds = {
                "input_ids": np.arange(before, before + tokens)[None] * 7 % 100,
                "attention_mask": np.ones((1, before + tokens), np.int64),
                "position_ids": np.arange(before, before + tokens)[None],
            }
            outputs = run_whole(wide, {**feeds, **past})
            past = {state.input: outputs[state.output] for state in session.manifest.states}
            got = sequence.run(feeds)["logits"].astype(np.float32)
            assert np.abs(got - outputs["logits"]).max() < 3e-2 * np.abs(outputs["logits"]).max()


def test_a_model_with_sizes_of_its_own_is_tried(tmp_path: Path) -> None:
    """Sizes that nobody gave are tried on the model, whose output numpy has no type for."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    m (int64[batch, length] ids) => (bfloat16[batch, length, 4] y) {
        row = Gather (table, ids)  y = Mul (row, row)
    }"""
    made = onnx.parser.parse_model(text)
    table = np.ones((8, 4), ml_dtypes.bfloat16)
    made.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    onnx.save(made, tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["cpu0"], Request(split_mode="layer"))
    compile_model(plan, tmp_path / "package")
    with Session(tmp_path / "package") as session:
        assert session.run({"ids": np.zeros((2, 3), np.int64)})["y"].shape == (2, 3, 4)
