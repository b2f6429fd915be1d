"""Inputs bound to constants: what is folded, what is removed, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from typer.testing import CliRunner

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.errors import ModelError
from splitc.compiler.modes.replanning import plan_from_file
from splitc.compiler.planning.plan_file import to_file, write_plan
from splitc.compiler.states.states import find_states
from splitc.runtime import Session
from splitc.runtime.arrays.settings import parse_settings, setting_array
from splitc.runtime.cli.app import app
from splitc.runtime.errors import FeedError, MisuseError, OutputsDifferError
from splitc.runtime.package.manifest_file import read_manifest
from tests.conftest import Arrays, assert_close, run_whole
from tests.helpers.graphs import read_graph

WriteModel = Callable[[str], Path]


LAYERS = range(4)


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    """optimum's merged decoder: an If whose branches, with and without a past, read all weights."""

    def branch(name: str, first: str) -> str:
        lines = [f"h0 = {first}"]
        for n in LAYERS:
            lines += [f"m{n} = MatMul (h{n}, W{n})", f"r{n} = Relu (m{n})", f"h{n + 1} = Add (h{n}, r{n})"]
        return f"{name} = {name} () => (float[n, 32] out) {{ {' '.join(lines)} out = Identity (h{len(LAYERS)}) }}"

    weights = ", ".join(f"float[32, 32] W{n}" for n in LAYERS)
    model = ir.from_onnx_text(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        merged (float[n, 32] x, float[n, 32] past, bool[1] use_past, {weights}) => (float[n, 32] y) {{
            y = If (use_past) <{branch("then_branch", "Sub (past, x)")}, {branch("else_branch", "Identity (x)")}>
        }}"""
    )
    generator = np.random.default_rng(0)
    for value in model.graph.inputs[3:]:
        model.graph.inputs.remove(value)
        value.const_value = ir.tensor(generator.standard_normal((32, 32)).astype(np.float32) / 6)
        model.graph.register_initializer(value)
    ir.save(model, tmp_path / "merged.onnx")
    return tmp_path / "merged.onnx"


def feeds(use_past: bool) -> Arrays:
    generator = np.random.default_rng(0)
    arrays = {name: generator.standard_normal((3, 32)).astype(np.float32) for name in ("x", "past")}
    return {**arrays, "use_past": np.array([use_past])}


@pytest.mark.parametrize("mode", ["layer", "row", "tensor"])
def test_refusal_names_the_option_and_the_input_that_decides(mode: str, merged: Path) -> None:
    with pytest.raises(ModelError, match="flow without --set use_past=true: its condition depends on this input"):
        plan_model(merged, ["2xcpu"], Request(split_mode=mode))


def test_branches_that_use_one_name_run_on_one_device(write_model: WriteModel, tmp_path: Path) -> None:
    """One branch's constant, which becomes a weight of the model, has the name of a value in the other branch."""
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        switched (float[n] x, bool flag) => (float[n] y) {
            y = If (flag) <
                then_branch = one () => (float[n] a) { c = Constant <value = float {2.0}> ()  a = Mul (x, c) },
                else_branch = two () => (float[n] b) { c = Neg (x)  b = Exp (c) }
            >
        }"""
    )
    compile_model(plan_model(path, ["cpu0"], Request()), tmp_path / "package")
    x = np.array([1, 2], np.float32)
    with Session(tmp_path / "package") as session:
        for flag in (True, False):
            whole = {"x": x, "flag": np.array(flag)}
            assert_close(session.run(whole), run_whole(path, whole))


@pytest.mark.parametrize("mode", ["layer", "row"])
@pytest.mark.parametrize("use_past", [True, False])
def test_branch_that_is_taken_is_split_and_takes_what_it_reads(
    mode: str, use_past: bool, merged: Path, tmp_path: Path
) -> None:
    settings = {"use_past": use_past}
    plan = plan_model(
        merged, ["2xcpu"], Request(split_mode=mode, row_min=8 if mode == "row" else 256, settings=settings)
    )
    write_plan(plan, tmp_path / "plan.json")
    assert to_file(plan_from_file(merged, tmp_path / "plan.json")) == to_file(plan)
    compile_model(plan, tmp_path / "package")
    whole = feeds(use_past)
    expected = run_whole(merged, whole)
    with Session(tmp_path / "package") as session:
        names = [tensor.name for tensor in session.inputs]
        assert names == (["x", "past"] if use_past else ["x"])
        assert_close(session.run({name: whole[name] for name in names}), expected)
        assert_close(session.run(whole), expected)
        with pytest.raises(FeedError, match=r"'use_past' is \[(True|False)\], and the package was compiled with"):
            session.run({**whole, "use_past": np.array([not use_past])})
        if not use_past:
            with pytest.raises(FeedError, match="'past' has shape 3 x 8, and the model takes n x 32"):
                session.run({**whole, "past": whole["past"][:, :8]})
    manifest = read_manifest(tmp_path / "package")
    values = {fixed.name: fixed.value for fixed in manifest.fixed}
    assert values == ({"use_past": [True]} if use_past else {"use_past": [False], "past": None})
    assert all(rank.weights_bytes >= 2 * 32 * 32 * 4 for rank in manifest.ranks)


def test_input_that_lost_its_readers_has_a_shape_and_is_listed(merged: Path, tmp_path: Path) -> None:
    package = str(tmp_path / "package")
    made = ["compile", str(merged), "-o", package, "-d", "2xcpu", "--split-mode", "layer", "--set", "use_past=false"]
    done = CliRunner().invoke(app, [*made, "--shapes", "past:5x32"], catch_exceptions=False)
    assert done.exit_code == 0
    assert read_manifest(Path(package)).inputs[0].sample_shape == [5, 32]
    listed = CliRunner().invoke(app, ["inspect", package], catch_exceptions=False).output
    assert "ignored input  past" in listed and "bound input    use_past" in listed
    wrong = CliRunner().invoke(app, [*made, "--force", "--shapes", "past:5x31"])
    assert "'past' as 5 x 31, and the model takes n x 32" in str(wrong.exception)


def test_check_feeds_the_whole_model_what_was_set(merged: Path, tmp_path: Path) -> None:
    package = str(tmp_path / "package")
    made = ["compile", str(merged), "-o", package, "-d", "2xcpu", "--split-mode", "layer", "--set", "use_past=false"]
    assert CliRunner().invoke(app, made, catch_exceptions=False).exit_code == 0
    check = ["check", package, "--model", str(merged), "--no-memory"]
    assert CliRunner().invoke(app, check, catch_exceptions=False).exit_code == 0
    bench = ["bench", package, "--baseline", str(merged), "--no-memory", "--runs", "2"]
    assert CliRunner().invoke(app, bench, catch_exceptions=False).exit_code == 0
    other = CliRunner().invoke(app, [*check, "--set", "use_past=true"])
    assert isinstance(other.exception, OutputsDifferError)


def test_choices_and_arithmetic_that_follow_are_folded(write_model: WriteModel) -> None:
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        switched (float[n, 4] x, float[n, 4] other, int64 rate, bool flag) => (float[n, 4] y, float[n, m] z)
        <int64 sixteen = {16000}, int64[1] four = {4000}, int64[1] whole = {-1}> {
            fast = Equal (rate, sixteen)
            both = And (fast, flag)
            a = Where (both, x, other)
            kept = Relu (a)
            y = Identity (kept)
            part = Div (rate, four)
            shape = Concat <axis = 0> (whole, part)
            z = Reshape (kept, shape)
        }"""
    )
    graph = read_graph(path, {"rate": 16000, "flag": True})
    assert [value.name for value in graph.graph.inputs] == ["x"]
    assert "Where" not in [node.op_type for node in graph.nodes]
    assert {fixed.input.name for fixed in graph.fixed} == {"rate", "flag", "other"}


def test_choice_that_may_make_its_result_larger_stays(write_model: WriteModel) -> None:
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        wide (float[1, 4] x, float[n, 4] other, bool flag) => (float[n, 4] y) { y = Where (flag, x, other) }"""
    )
    graph = read_graph(path, {"flag": True})
    assert [node.op_type for node in graph.nodes] == ["Where"]
    assert [value.name for value in graph.graph.inputs] == ["x", "other"]


def test_branch_that_is_taken_keeps_the_models_names_of_sizes(write_model: WriteModel) -> None:
    """Otherwise a hidden state would seem to grow along its rows, and be planned without rows."""
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[batch, 3] x, float[2, batch, 3] h, bool c) => (float[batch] y, float[2, batch, 3] hn) {
            y, hn = If (c) <
                then_branch = t () => (float[rows] p, float[2, rows, 3] q) {
                    p = ReduceMax <axes = [1], keepdims = 0> (x)  q = Add (h, x)
                },
                else_branch = e () => (float[rows] r, float[2, rows, 3] s) {
                    r = ReduceMin <axes = [1], keepdims = 0> (x)  s = Sub (h, x)
                }
            >
        }"""
    )
    graph = read_graph(path, {"c": True})
    assert [str(size) for size in graph.outputs[1].shape or ()] == ["2", "batch", "3"]
    assert [state.grows for state in find_states(graph)] == [None]


def test_what_follows_from_a_setting_is_computed_silently(
    write_model: WriteModel, caplog: pytest.LogCaptureFixture
) -> None:
    """The library warns about values without a type, which these are before inference."""
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[batch, 3] x, int64 rate) => (float[n] y) {
            double = Mul (rate, rate)  c = Cast <to = 9> (double)
            y = If (c) <
                then_branch = t () => (float[n] p) { p = ReduceMax <axes = [1], keepdims = 0> (x) },
                else_branch = e () => (float[m] r) { r = ReduceMin <axes = [1], keepdims = 0> (x) }
            >
        }"""
    )
    graph = read_graph(path, {"rate": 2})
    assert [node.op_type for node in graph.nodes if node not in graph.folded] == ["ReduceMax"]
    assert caplog.records == []


def test_branch_that_is_a_value_from_outside(write_model: WriteModel) -> None:
    """An inner value that is two outputs, and an output that is not an inner value."""
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        outer (float[4] x, bool c) => (float[4] y, float[4] z) {
            y, z = If (c) <
                then_branch = a () => (float[4] p, float[4] q) { p = Relu (x) q = Identity (x) },
                else_branch = b () => (float[4] p, float[4] q) { p = Neg (x) q = Abs (x) }
            >
        }"""
    )
    model = ir.load(path)
    (node,) = model.graph
    branch = node.attributes["then_branch"].as_graph()
    branch.outputs[1] = branch.outputs[0]
    branch.remove(branch[1])
    ir.save(model, path)
    graph = read_graph(path, {"c": True})
    assert [value.name for value in graph.outputs] == ["y", "z"]
    assert [node.op_type for node in graph.nodes] == ["Relu", "Identity"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nobody": 1}, "--set names 'nobody', and the model has no such input: it has x, past, use_past"),
        ({"use_past": 2}, "takes bool, which has no such value"),
        ({"use_past": "yes"}, "give a number, true or false"),
        ({"use_past": [True, False]}, "so give a value of that shape"),
        ({"x": 1}, "so give a value of that shape"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str, merged: Path) -> None:
    with pytest.raises(MisuseError, match=message):
        read_graph(merged, settings)


def test_settings_as_the_command_line_takes_them() -> None:
    assert parse_settings(["a=true", "b=False", "c=16000", "d=[1, 2]", "e=0.5"]) == {
        "a": True,
        "b": False,
        "c": 16000,
        "d": [1, 2],
        "e": 0.5,
    }
    for text in ("a", "=1", "a=b", "a=", "a=" + "[" * 100_000):
        with pytest.raises(MisuseError, match="can't read --set"):
            parse_settings([text])


def test_settings_are_rounded_to_the_type_and_no_other() -> None:
    assert setting_array("scale", 0.1, "float32", []) == np.float32(0.1)
    assert setting_array("scale", [0.1, 7.5], "bfloat16", [2]).tolist() == [0.10009765625, 7.5]
    assert setting_array("count", 2**64 - 1, "uint64", []) == 2**64 - 1
    for given, dtype in ((0.1, "int64"), (1e39, "float32"), (-1, "uint8"), ([[1], 2], "int64")):
        with pytest.raises(MisuseError, match=r"no such value|its lists have several lengths"):
            setting_array("x", given, dtype, None)
