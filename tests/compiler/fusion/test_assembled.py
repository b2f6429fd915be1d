"""Consecutive assignments to slices become one Concat with the same values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from splitc.compiler.analysis.facts import analyze
from splitc.compiler.fusion.fuse import Fused, fuse
from splitc.compiler.patterns.kernels import ON_CPUS
from splitc.compiler.request.shapes import AskedShapes
from tests.compiler.fusion.test_fuse import run
from tests.helpers.written_attention import operators

HEAD = """<ir_version: 8, opset_import: ["" : 18]>
write (float[b, 2, l, 4] x, float[b, 2, l, 3] z) => (float[b, 2, l, 7] y) {
    zero = Constant <value_ints = [0]> ()  last = Constant <value_ints = [-1]> ()
    start = Constant <value_int = 0> ()  step = Constant <value_int = 1> ()
    full = Shape (x)  n3 = Constant <value_ints = [3]> ()  three = Slice (full, zero, n3)
    n7 = Constant <value_ints = [7]> ()  all = Concat <axis = 0> (three, n7)  empty = ConstantOfShape (all)"""


def fronted(number: int, base: str, rows: str, begin: int, end: int, stride: int = 1) -> str:
    """The form of torch's newer exporter: the last axis is transposed to the front."""
    return f"""sizes_{number} = Shape ({base})  at_{number} = Constant <value_int = 3> ()
        count_{number} = Gather (sizes_{number}, at_{number})  row_{number} = Range (start, count_{number}, step)
        from_{number} = Constant <value_ints = [{begin}]> ()  to_{number} = Constant <value_ints = [{end}]> ()
        stride_{number} = Constant <value_ints = [{stride}]> ()
        list_{number} = Slice (row_{number}, from_{number}, to_{number}, zero, stride_{number})
        index_{number} = Unsqueeze (list_{number}, last)
        rows_{number} = Transpose <perm = [3, 1, 2, 0]> ({rows})
        base_{number} = Transpose <perm = [3, 1, 2, 0]> ({base})
        put_{number} = ScatterND (base_{number}, index_{number}, rows_{number})
        made_{number} = Transpose <perm = [3, 1, 2, 0]> (put_{number})
    """


def listed(number: int, base: str, rows: str, begin: int, end: int, stride: int = 1) -> str:
    """The form of TorchScript's exporter: the indices of every element."""
    text = f"sizes_{number} = Shape ({base})  written_{number} = Shape ({rows})\n"
    names = []
    for axis in range(4):
        name, shape = f"{number}_{axis}", [1] * 4
        shape[axis] = -1
        bounds = (begin, end) if axis == 3 else (0, 1 << 40)
        text += f"""at_{name} = Constant <value_int = {axis}> ()  count_{name} = Gather (sizes_{number}, at_{name})
            row_{name} = Range (start, count_{name}, step)
            from_{name} = Constant <value_ints = [{bounds[0]}]> ()  to_{name} = Constant <value_ints = [{bounds[1]}]> ()
            stride_{name} = Constant <value_ints = [{stride if axis == 3 else 1}]> ()
            list_{name} = Slice (row_{name}, from_{name}, to_{name}, zero, stride_{name})
            grid_{name} = Constant <value_ints = {shape}> ()  apart_{name} = Reshape (list_{name}, grid_{name})
            every_{name} = Expand (apart_{name}, written_{number})  one_{name} = Unsqueeze (every_{name}, last)
        """
        names.append(f"one_{name}")
    return f"""{text}  index_{number} = Concat <axis = -1> ({", ".join(names)})
        same_{number} = Expand ({rows}, written_{number})
        made_{number} = ScatterND ({base}, index_{number}, same_{number})
    """


def fused(body: str, folder: Path) -> tuple[Fused, onnx.ModelProto]:
    model = onnx.parser.parse_model(f"{HEAD} {body} }}")
    onnx.save(model, folder / "model.onnx")
    analysis = analyze(folder / "model.onnx", AskedShapes({"x": (1, 2, 5, 4), "z": (1, 2, 5, 3)}), 1)
    return fuse(analysis.graph, analysis.shapes, analysis.costs.bound, ON_CPUS), model


def check(body: str, folder: Path) -> list[str]:
    made, model = fused(body, folder)
    assert [(outcome.kind, outcome.operator) for outcome in made.outcomes] == [("slices", "Concat")]
    random, names = np.random.default_rng(0), operators(made.graph.graph)
    inputs = {name: random.random((3, 2, 4, size), np.float32) for name, size in (("x", 4), ("z", 3))}
    np.testing.assert_array_equal(run(ir.to_proto(made.graph.model), inputs), run(model, inputs))
    return names


@pytest.mark.parametrize("write", [fronted, listed])
def test_slices_are_joined(tmp_path: Path, write: Callable[[int, str, str, int, int], str]) -> None:
    body = write(0, "empty", "x", 0, 4) + write(1, "made_0", "z", 4, 7) + "y = Neg (made_1)"
    assert check(body, tmp_path) == ["Concat", "Neg"]


@pytest.mark.parametrize("write", [fronted, listed])
@pytest.mark.parametrize("first", [0, 1])
def test_slices_that_take_turns_are_stacked(
    tmp_path: Path, write: Callable[..., str], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As rotated pairs are written: `out[..., 0::2] = a`, and `out[..., 1::2] = b`."""
    monkeypatch.setattr("tests.compiler.fusion.test_assembled.HEAD", HEAD.replace("7", "8"))
    body = write(0, "empty", "x", first, 8, 2) + write(1, "made_0", "opposite", 1 - first, 8, 2)
    names = check(f"opposite = Neg (x) {body} y = Neg (made_1)", tmp_path)
    assert "ScatterND" not in names and names.count("Concat") <= 2


def test_slices_with_steps_that_do_not_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.compiler.fusion.test_assembled.HEAD", HEAD.replace("7", "8"))
    body = fronted(0, "empty", "twice", 0, 8) + fronted(1, "made_0", "x", 0, 8, 2)
    made, _ = fused(f"twice = Concat <axis = -1> (x, x) {body} y = Neg (made_1)", tmp_path)
    assert [outcome.why for outcome in made.outcomes] == ["its slices have steps, and do not interleave"]


def test_transposes_that_an_optimizer_has_taken_out(tmp_path: Path) -> None:
    """Between two assignments, it leaves an Identity of two transposes that undo each other."""
    body = fronted(0, "empty", "x", 0, 4) + fronted(1, "made_0", "z", 4, 7) + "y = Neg (made_1)"
    between = "base_1 = Transpose <perm = [3, 1, 2, 0]> (made_0)"
    assert between in body
    assert check(body.replace(between, "base_1 = Identity (put_0)"), tmp_path) == ["Concat", "Neg"]


def test_a_later_slice_covers_part_of_an_earlier_one(tmp_path: Path) -> None:
    body = fronted(0, "empty", "x", 3, 7) + fronted(1, "made_0", "x", 0, 4) + "y = Neg (made_1)"
    assert check(body, tmp_path) == ["Slice", "Concat", "Neg"]


def test_what_is_not_brought_back_is_turned(tmp_path: Path) -> None:
    body = fronted(0, "empty", "x", 0, 4) + fronted(1, "made_0", "z", 4, 7)
    turned = "negative = Neg (put_1)  y = Transpose <perm = [3, 1, 2, 0]> (negative)"
    assert check(body + turned, tmp_path) == ["Concat", "Transpose", "Neg", "Transpose"]


def test_places_that_nothing_is_written_to(tmp_path: Path) -> None:
    """If the slices do not cover the tensor, it stays: the rest has to be copied anyway, and no transpose is saved."""
    made, _ = fused(listed(0, "empty", "x", 1, 5) + "y = Neg (made_0)", tmp_path)
    assert [(outcome.kind, outcome.operator) for outcome in made.outcomes] == [("slices", None)]


def test_places_that_keep_what_was_there(tmp_path: Path) -> None:
    """As CogVideoX's: the queries of the text stay, and those of the video are rotated."""
    text = "filled = Concat <axis = -1> (x, z)  before = Neg (filled)"
    names = check(f"{text} {fronted(0, 'before', 'z', 2, 5)} y = Neg (made_0)", tmp_path)
    assert "ScatterND" not in names and "Transpose" not in names and names.count("Slice") == 2


def test_places_that_follow_from_data_are_no_slice(tmp_path: Path) -> None:
    body = fronted(0, "empty", "x", 0, 4).replace("count_0 = Gather (sizes_0, at_0)", "count_0 = Cast <to = 7> (big)")
    fed = "sum = ReduceMax <keepdims = 0> (x)  ten = Constant <value_float = 10.0> ()  big = Add (sum, ten)"
    made, _ = fused(fed + body + "y = Neg (made_0)", tmp_path)
    assert made.outcomes == () and "ScatterND" in operators(made.graph.graph)
