"""A damaged model gives an error message, or a package that agrees with the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from models.llama import Size, build
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.errors import ModelError
from splitc.compiler.reading.loading import read_model
from splitc.runtime import Session
from splitc.runtime.errors import SplitcError
from splitc.runtime.tools.compare import compare
from splitc.runtime.tools.unsplit import CPU, open_unsplit
from tests.helpers.fuzz import MORE, damage_bytes, damage_message, seeds

SIZE = Size(layers=1, hidden=16, heads=2, kv_heads=2, feed_forward=32, vocabulary=24)
FEEDS = {
    "input_ids": np.array([[1, 2, 3]]),
    "attention_mask": np.ones((1, 3), np.int64),
    "position_ids": np.array([[0, 1, 2]]),
    **{f"past_key_values.0.{part}": np.zeros((1, 2, 0, 8), "f4") for part in ("key", "value")},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    path = tmp_path_factory.mktemp("whole") / "model.onnx"
    save(build(SIZE), path)
    return onnx.load(path)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", seeds(2))
def test_damage_ends_in_a_message(whole: onnx.ModelProto, seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng(seed)
    for number in range(4 if MORE == 1 else 8):
        model = onnx.ModelProto()
        model.CopyFrom(whole)
        for _ in range(random.integers(1, 4)):
            damage_message(model, random)
        content = model.SerializeToString()
        path = tmp_path / f"{number}.onnx"
        path.write_bytes(damage_bytes(content, random) if random.random() < 0.2 else content)
        mode = ["layer", "tensor", "row"][random.integers(3)]
        try:
            plan = plan_model(path, ["2xcpu"], Request(split_mode=mode))
            compile_model(plan, tmp_path / f"package{number}")
        except SplitcError:
            assert not (tmp_path / f"package{number}").exists()
            continue
        _agree(path, tmp_path / f"package{number}")


def _agree(model: Path, package: Path) -> None:
    """Check that the package agrees with the model, if the model runs."""
    with Session(package, threads=1) as session:
        names = [tensor.name for tensor in session.inputs]
        try:
            feeds = {name: FEEDS[name] for name in names}
            with open_unsplit(model, CPU, 1) as unsplit:
                expected, again = unsplit(feeds), unsplit(feeds)
        except (KeyError, SplitcError, ort.capi.onnxruntime_pybind11_state.InvalidArgument):
            return  # it takes something else
        if not all(output.passed for output in compare(expected, again, number_type="float32")):
            return  # it reads what was never written
        try:
            outputs = session.run(feeds)
        except SplitcError:
            return
    compared = compare(expected, outputs, number_type="float32")
    assert all(output.passed for output in compared), [output for output in compared if not output.passed]


@pytest.mark.parametrize(
    "names",
    [
        ["9**9**9**9", "(" * 1500 + "n" + ")" * 1500, "[red]n[/red]", "é"],
        ["n" * 1999, "n\n", " ", "x/0"],
    ],
)
def test_names_of_dimensions_are_names(whole: onnx.ModelProto, names: list[str], tmp_path: Path) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(whole)
    values = [*model.graph.input, *model.graph.output]
    known = dict.fromkeys(size.dim_param for value in values for size in value.type.tensor_type.shape.dim)
    renamed = dict(zip(filter(None, known), names, strict=True))
    for value in values:
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param:
                size.dim_param = renamed[size.dim_param]
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode="tensor"))
    compile_model(plan, tmp_path / "package")
    _agree(tmp_path / "model.onnx", tmp_path / "package")


def test_input_that_is_declared_twice(whole: onnx.ModelProto, tmp_path: Path) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(whole)
    model.graph.input.append(model.graph.input[0])
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=f"the input '{model.graph.input[0].name}' is declared twice"):
        read_model(tmp_path / "model.onnx")


def test_output_that_is_listed_twice(whole: onnx.ModelProto, tmp_path: Path) -> None:
    """As torch's exporter lists what a module returns twice. ONNX Runtime returns it twice."""
    model = onnx.ModelProto()
    model.CopyFrom(whole)
    model.graph.output.insert(1, model.graph.output[0])
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    compile_model(plan_model(tmp_path / "model.onnx", ["2xcpu"]), tmp_path / "package")
    with Session(tmp_path / "package", threads=1) as session, open_unsplit(tmp_path / "model.onnx", CPU, 1) as unsplit:
        assert [tensor.name for tensor in session.outputs] == [value.name for value in whole.graph.output]
        outputs, expected = session.run(FEEDS), unsplit(FEEDS)
        assert list(outputs) == list(expected)
        assert all(output.passed for output in compare(expected, outputs))
