"""Number types that numpy lacks: inputs, outputs and values that cross cuts have them, or they are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.errors import ModelError
from splitc.compiler.planning.plan import Plan
from splitc.runtime import FeedError, Session
from splitc.runtime.arrays.array import number_type
from splitc.runtime.arrays.files import load_arrays, save_arrays
from splitc.runtime.arrays.onnx_types import CODES, KNOWN, read_type
from splitc.runtime.feeds.fills import make_inputs
from splitc.runtime.tools.compare import compare
from splitc.runtime.tools.unsplit import CPU, open_unsplit
from tests.helpers.blocks import Block
from tests.helpers.needs import needs_float8_outputs

FLOAT = TensorProto.FLOAT
MODES: dict[str, dict[str, Any]] = {"auto": {}, "batch": {}, "layer": {}, "tensor": {}, "row": {"row_min": 8}}


def write_casts(path: Path, source: int = FLOAT, crossing: int | None = None, target: int = FLOAT) -> Path:
    """Write four matmuls, with casts to and from these types before, between and after them."""
    names = ["x", "x0"]
    nodes = [helper.make_node("Cast", ["x"], ["x0"], to=FLOAT)]
    weights = []

    def add(operator: str, block: int, *others: str, **attributes: Any) -> None:
        names.append(f"v{len(names)}")
        where = f"/layers.{block}/{operator}{len(names)}"
        nodes.append(helper.make_node(operator, [names[-2], *others], [names[-1]], where, **attributes))

    for block in range(4):
        weight = np.random.default_rng(block).standard_normal((32, 32)).astype(np.float32) / 6
        weights.append(numpy_helper.from_array(weight, f"w{block}"))
        add("MatMul", block, f"w{block}")
        add("Relu", block)
        if crossing is not None:
            add("Cast", block, to=crossing)
            add("Cast", block, to=FLOAT)
    nodes.append(helper.make_node("Cast", [names[-1]], ["y"], to=target))
    inputs = [helper.make_tensor_value_info("x", source, ["n", 32])]
    outputs = [helper.make_tensor_value_info("y", target, ["n", 32])]
    graph = helper.make_graph(nodes, "casts", inputs, outputs, weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11), path)
    return path


def planned(model: Path, mode: str = "layer") -> Plan:
    return plan_model(model, ["2xcpu"], Request(split_mode=mode, shapes={"x": (2, 32)}, spread=True, **MODES[mode]))


def compiled(model: Path, folder: Path, mode: str = "layer") -> Path:
    compile_model(planned(model, mode), folder, verify=False)
    return folder


# Each type where there are cuts, and in each mode one that numpy has and one that it lacks.
PASSED = [(kind, "layer") for kind in (*(name for name in CODES if "e8m0" not in name), "float64", "float16")]
PASSED += [(kind, mode) for mode in ("tensor", "row") for kind in ("bfloat16", "float8_e5m2", "float64")]


@pytest.mark.parametrize(("kind", "mode"), PASSED)
def test_types_go_in_and_out_and_across(tmp_path: Path, kind: str, mode: str) -> None:
    code = CODES.get(kind) or helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    model = write_casts(tmp_path / "model.onnx", code, code, code)
    package = compiled(model, tmp_path / "package", mode)
    with Session(package) as session:
        feeds = make_inputs(session.inputs)
        assert feeds["x"].dtype == number_type(kind)
        with open_unsplit(model, CPU, 1) as whole:
            expected = whole(feeds)
        for found in (session.run(feeds), *session.map([feeds, feeds])):
            assert found["y"].dtype == number_type(kind)
            assert all(each.passed for each in compare(expected, found, number_type="float32"))
        for name in ("arrays.npz", "arrays.json"):
            save_arrays(tmp_path / name, feeds)
            again = session.run(load_arrays(tmp_path / name))["y"]
            np.testing.assert_array_equal(again.view(np.uint8), session.run(feeds)["y"].view(np.uint8))
        with pytest.raises(FeedError, match=f"'x' is int32, and the model takes {kind}"):
            session.run({"x": np.ones((2, 32), np.int32)})


@needs_float8_outputs
def test_bytes_are_not_taken_for_numbers(tmp_path: Path) -> None:
    """ONNX Runtime returns float8 as an array of bytes."""
    model = write_casts(tmp_path / "model.onnx", target=TensorProto.FLOAT8E4M3FN)
    floats = write_casts(tmp_path / "floats.onnx")
    with open_unsplit(floats, CPU, 1) as whole, Session(compiled(model, tmp_path / "package")) as session:
        feeds = make_inputs(session.inputs)
        given = session.run(feeds)["y"].astype(np.float32)
        expected = whole(feeds)["y"]
    np.testing.assert_allclose(given, expected, rtol=0.07, atol=0.01)


@pytest.mark.parametrize(
    ("kind", "mode"), [("STRING", "layer"), ("INT4", "tensor"), ("UINT4", "row"), ("STRING", "auto")]
)
@pytest.mark.parametrize(("place", "message"), [("source", "the input 'x'"), ("target", "the output 'y'")])
def test_what_can_not_be_handed_over_is_refused(tmp_path: Path, kind: str, mode: str, place: str, message: str) -> None:
    model = write_casts(tmp_path / "model.onnx", **{place: TensorProto.DataType.Value(kind)})
    remedy = "outside of the model" if kind == "STRING" else "begin and end with a Cast"
    with pytest.raises(ModelError, match=f"{message} is of type {kind}, and splitc passes on only bool, .*{remedy}"):
        planned(model, mode)


@pytest.mark.parametrize("kind", ["STRING", "INT4"])
def test_what_can_not_cross_a_cut_lies_within_a_stage(tmp_path: Path, kind: str) -> None:
    """Although fewer bytes would cross there."""
    model = write_casts(tmp_path / "model.onnx", crossing=TensorProto.DataType.Value(kind))
    with Session(compiled(model, tmp_path / "package")) as session, open_unsplit(model, CPU, 1) as whole:
        feeds = make_inputs(session.inputs)
        assert all(each.passed for each in compare(whole(feeds), session.run(feeds)))


def texts(b: Block) -> ir.Value:
    """32 texts, of more than a KiB."""
    array = np.array([f"{number:0128}".encode() for number in range(32)], object)
    return b.weight("texts", ir.StringTensor(array, name="texts"))


@pytest.mark.parametrize("mode", ["layer", "tensor", "batch"])
def test_long_tables_of_texts(mode: str, tmp_path: Path) -> None:
    """They stay in the graph's file: no text lies outside of it."""
    b, model = Block(21), tmp_path / "model.onnx"
    y = b.op("MatMul", b.op("MatMul", b.data("x", (2, 32), ["n", 32]), b.w("A", 32, 32)), b.w("B", 32, 32))
    b.give(b.op("Add", y, b.op("Cast", b.op("Gather", texts(b), b.op("ArgMax", y, axis=1)), to=FLOAT)), "y", ["n", 32])
    ir.save(b.model(), model)
    with Session(compiled(model, tmp_path / "package", mode)) as session, open_unsplit(model, CPU, 1) as whole:
        feeds = make_inputs(session.inputs)
        assert all(each.passed for each in compare(whole(feeds), session.run(feeds)))


def test_what_crosses_all_cuts_and_can_not_is_refused(tmp_path: Path) -> None:
    b, model = Block(21), tmp_path / "model.onnx"
    text = b.op("Gather", texts(b), b.indices("x", [[1], [2]], ["n", 1]))
    x = b.op("Mul", b.op("Cast", text, to=FLOAT), b.w("row", 32))
    y = b.op("MatMul", b.op("MatMul", x, b.w("A", 32, 32)), b.w("B", 32, 32))
    b.give(b.op("Add", y, b.op("Cast", b.op("Cast", text, to=TensorProto.INT32), to=FLOAT)), "y", ["n", 32])
    ir.save(b.model(), model)
    with pytest.raises(ModelError, match=r"the value that crosses a cut '[^']*' is of type STRING, .* passes on only"):
        plan_model(model, ["2xcpu"], Request(split_mode="layer", shapes={"x": (2, 1)}, spread=True))


def test_names_are_read_as_onnxruntime_writes_them() -> None:
    written = ["bfloat16", "float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz", "float8e8m0"]
    assert [read_type(f"tensor({name})") for name in written] == list(CODES)
    assert [read_type(f"tensor({name})") for name in ("float", "double", "bool")] == ["float32", "float64", "bool"]
    assert all(number_type(name).name == name for name in KNOWN)


def test_states_may_be_of_any_type(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["past"], ["before"], to=FLOAT),
        helper.make_node("Add", ["before", "x"], ["sum"]),
        helper.make_node("Cast", ["sum"], ["y"], to=TensorProto.DOUBLE),
        helper.make_node("Cast", ["sum"], ["present"], to=TensorProto.BFLOAT16),
    ]
    graph = helper.make_graph(
        nodes,
        "sum",
        [
            helper.make_tensor_value_info("x", FLOAT, [1, 4]),
            helper.make_tensor_value_info("past", TensorProto.BFLOAT16, [1, 4]),
        ],
        [
            helper.make_tensor_value_info("y", TensorProto.DOUBLE, [1, 4]),
            helper.make_tensor_value_info("present", TensorProto.BFLOAT16, [1, 4]),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["cpu0"], Request(split_mode="layer"))
    compile_model(plan, tmp_path / "package")
    with Session(tmp_path / "package") as session, session.start() as sequence:
        sums = [sequence.run({"x": np.ones((1, 4), np.float32)})["y"][0, 0] for _ in range(3)]
    assert sums == [1, 2, 3]


def test_package_for_gpus_that_cpus_can_not_run_is_unverified(
    write_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """ONNX Runtime has no CPU kernel for Erf of double precision. The package may run on GPUs."""
    model = write_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (double[n, 4] x) => (double[n, 4] y) { y = Erf (x) }'
    )
    warnings, said = list[str](), list[str]()
    plan = plan_model(model, ["cuda0"], Request(memory=("1GiB",)))
    compile_model(plan, tmp_path / "package", warn=warnings.append, say=said.append)
    assert (tmp_path / "package" / "manifest.json").is_file()
    assert said[0].endswith("its nodes were run one by one, but for those that this machine's CPU has no kernel for")
    (warning,) = warnings
    assert warning.startswith("the package is unverified: this machine's CPU devices can't run it: [ONNXRuntimeError]")
    assert "NOT_IMPLEMENTED" in warning and warning.endswith("compare it where its GPUs are: splitc check")
    with pytest.raises(ModelError, match="ONNX Runtime can't load"):
        compile_model(plan_model(model, ["cpu0"], Request()), tmp_path / "other")


@pytest.mark.parametrize(
    ("last", "said"),
    [("y = SplitToSequence <axis = 1> (x)", "a sequence, and"), ("y = Optional (x)", "an optional value, and")],
)
def test_outputs_that_are_no_tensors_are_named(last: str, said: str, tmp_path: Path) -> None:
    kind = "seq" if "Sequence" in last else "optional"
    text = f'<ir_version: 8, opset_import: ["" : 17]> g (float[n, 4] x) => ({kind}(float[n, m]) y) {{ {last} }}'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=f"the output 'y' is {said} splitc passes on only tensors. Export"):
        plan_model(tmp_path / "model.onnx", "2xcpu", Request(split_mode="layer", shapes={"x": (2, 4)}))
