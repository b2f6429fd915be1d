"""A model may read its own data files, and no others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import set_external_data

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.errors import ModelError
from splitc.compiler.inference.folding import fold_shapes
from splitc.compiler.reading.loading import read_model
from splitc.runtime import Session
from tests.helpers.command import splitc

NUMBERS = np.arange(64, dtype=np.float32)
PLACES = ("weight", "constant", "in a branch", "in a function", "in a function's branch")


def external(location: str, offset: int = 0) -> TensorProto:
    tensor = numpy_helper.from_array(NUMBERS, "w")
    set_external_data(tensor, location, offset, NUMBERS.nbytes)
    tensor.ClearField("raw_data")
    return tensor


def model(place: str, tensor: TensorProto) -> onnx.ModelProto:
    """y = x + w, with w stored in `place`."""
    constant = helper.make_node("Constant", [], ["w"], value=tensor)
    value = helper.make_tensor_value_info("w", TensorProto.FLOAT, [64])
    branch = helper.make_graph([constant], "branch", [], [value])
    condition = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.array(True)))
    choice = helper.make_node("If", ["c"], ["w"], then_branch=branch, else_branch=branch)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    inside = {"in a function": [constant], "in a function's branch": [condition, choice]}.get(place)
    functions = [helper.make_function("own", "F", [], ["w"], inside, opsets[:1])] if inside else []
    call = helper.make_node("F", [], ["w"], domain="own")
    before = {"weight": [], "constant": [constant], "in a branch": [condition, choice]}.get(place, [call])
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 64]) for name in "xy")
    nodes = [*before, helper.make_node("Add", ["x", "w"], ["y"])]
    graph = helper.make_graph(nodes, "g", [x], [y], [tensor] if place == "weight" else [])
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=8)


WAYS = ["absolute", "above", "through a folder", "link", "linked folder"]


def model_outside(place: str, how: str, tmp_path: Path) -> Path:
    """A model whose data lie outside its folder."""
    secret, folder = tmp_path / "secret", tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    secret.write_bytes(NUMBERS.tobytes())
    (folder / "link").symlink_to(secret)
    (folder / "up").symlink_to(tmp_path)
    where = {
        "absolute": str(secret),
        "above": "../secret",
        "through a folder": "sub/../../secret",
        "link": "link",
        "linked folder": "up/secret",
    }
    (folder / "m.onnx").write_bytes(model(place, external(where[how])).SerializeToString())
    return folder / "m.onnx"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", WAYS)
def test_nothing_comes_from_outside(place: str, how: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'w' lies in .* outside the model's folder: --trust-external-data permits"):
        read_model(model_outside(place, how, tmp_path))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", WAYS)
def test_data_outside_that_are_trusted(place: str, how: str, tmp_path: Path) -> None:
    path = model_outside(place, how, tmp_path)
    plan = plan_model(path, ["cpu0"], Request(split_mode="layer", shapes={"x": (1, 64)}, trust_external_data=True))
    assert plan.analysis.graph.data_files == {tmp_path / "secret"}
    compile_model(plan, tmp_path / "package")
    with Session(tmp_path / "package") as session:
        assert np.array_equal(session.run({"x": np.ones((1, 64), "f4")})["y"], NUMBERS[None] + 1)


def test_commands_that_open_a_model_whose_data_are_outside(tmp_path: Path) -> None:
    """Each command refuses it, naming the option, and takes it with the option. A plan grants no permission."""
    path, plan, package = model_outside("weight", "link", tmp_path), tmp_path / "plan.json", tmp_path / "package"
    trust, device = "--trust-external-data", ["-d", "2xcpu", "--split-mode", "tensor", "--shapes", "x:2x64"]
    for command in (
        ["plan", path, *device, "-o", plan],
        ["compile", path, "--plan", plan, "-o", package],
        ["check", package, "--model", path, "--no-memory"],
        ["bench", package, "--baseline", path, "--runs", "1", "--no-memory"],
    ):
        # ONNX Runtime 1.23 does not look where a link leads: for Python 3.10 there is no later one.
        if command[0] in ("plan", "compile") or not onnxruntime.__version__.startswith("1.23."):
            assert trust in splitc(*command, code=1).stderr
        splitc(*command, trust)


def test_other_faults_stay_faults_of_trusted_data(tmp_path: Path) -> None:
    path = model_outside("weight", "link", tmp_path)
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(ModelError, match="too short"):
        read_model(path, trusts_data=True)
    (tmp_path / "secret").unlink()
    with pytest.raises(ModelError, match="is missing"):
        read_model(path, trusts_data=True)


@pytest.mark.parametrize("place", PLACES)
def test_what_lies_beside_the_model_is_its_own(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any working folder."""
    (tmp_path / "data").write_bytes(NUMBERS.tobytes())
    (tmp_path / "m.onnx").write_bytes(model(place, external("data")).SerializeToString())
    monkeypatch.chdir("/")
    plan = plan_model(tmp_path / "m.onnx", ["cpu0"], Request(split_mode="layer", shapes={"x": (1, 64)}))
    assert plan.analysis.graph.data_files == {tmp_path / "data"}
    compile_model(plan, tmp_path / "package")
    with Session(tmp_path / "package") as session:
        assert np.array_equal(session.run({"x": np.ones((1, 64), "f4")})["y"], NUMBERS[None] + 1)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("location", "offset", "message"),
    [
        ("none", 0, r"none is missing \(it holds weight 'w'\)"),
        ("data", 8, "too short: weight 'w' ends at byte 264, and the file has 256"),
        ("data", -8, "-8"),
        ("sub", 0, "sub is missing"),
        ("n" * 300, 0, "File name too long"),
        ("a\0b", 0, "'w' lies in"),
        ("", 0, "'w' lies in another file, which is not named"),
    ],
)
def test_what_is_not_there_is_named(place: str, location: str, offset: int, message: str, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(NUMBERS.tobytes())
    (tmp_path / "sub").mkdir()
    (tmp_path / "m.onnx").write_bytes(model(place, external(location, offset)).SerializeToString())
    with pytest.raises(ModelError, match=message):
        read_model(tmp_path / "m.onnx")


def test_files_of_a_cache_that_are_links(tmp_path: Path) -> None:
    """As in a hub's cache: files named by hash in one folder, and links with their names in another."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots" / "1f3a").mkdir(parents=True)
    (tmp_path / "blobs" / "e5b1").write_bytes(model("weight", external("m.onnx_data")).SerializeToString())
    (tmp_path / "blobs" / "90c2").write_bytes(NUMBERS.tobytes())
    for name, blob in (("m.onnx", "e5b1"), ("m.onnx_data", "90c2")):
        (tmp_path / "snapshots" / "1f3a" / name).symlink_to(Path("..", "..", "blobs", blob))
    _, files = read_model(tmp_path / "snapshots" / "1f3a" / "m.onnx")
    assert files == {tmp_path / "blobs" / "90c2"}
    with pytest.raises(ModelError, match=r"m\.onnx_data is missing"):  # relative to the folder that was named
        read_model(tmp_path / "blobs" / "e5b1")


def test_sizes_in_a_file_beside_the_model_are_folded(tmp_path: Path) -> None:
    """ONNX Runtime gets their values with the node that it runs alone, not the file's name."""
    (tmp_path / "sizes").write_bytes(np.array([2, 3], np.int64).tobytes())
    tensor = ir.ExternalTensor("sizes", 0, 16, ir.DataType.INT64, shape=ir.Shape([2]), name="s", base_dir=tmp_path)
    sizes = ir.Value(name="s", shape=ir.Shape([2]), type=ir.TensorType(ir.DataType.INT64), const_value=tensor)
    node = ir.node("Concat", [sizes, sizes], {"axis": 0})
    graph = ir.Graph([], node.outputs, nodes=[node], initializers=[sizes], opset_imports={"": 17})
    assert fold_shapes(graph) == 1
    folded = node.outputs[0].const_value
    assert folded is not None
    assert folded.numpy().tolist() == [2, 3, 2, 3]
    assert tensor.name == "s"
