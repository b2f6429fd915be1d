"""Opening models: what is brought into normal form, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from models.writer import Writer, save
from splitc.compiler.errors import ModelError
from splitc.compiler.graph import open_graph

WriteModel = Callable[[str], Path]


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such model file"):
        open_graph(tmp_path / "none.onnx")


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x00" * 100, b"PK\x03\x04"])
def test_not_onnx(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="is not an ONNX model"):
        open_graph(path)


@pytest.fixture
def external(tmp_path: Path) -> Path:
    """A model of one product, its weight in a file beside it."""
    w = Writer()
    x = w.input("x", ir.DataType.FLOAT, ["n", 64])
    y = w.op("MatMul", x, w.weight("weight", ir.tensor(np.ones((64, 64), np.float32))))
    w.output(y, "y", ir.DataType.FLOAT, ["n", 64])
    save(w.model(), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_missing_external_data(external: Path) -> None:
    external.with_name("model.onnx.data").unlink()
    with pytest.raises(ModelError, match=r"model.onnx.data is missing \(it holds weight 'weight'\)"):
        open_graph(external)


def test_external_data_too_short(external: Path) -> None:
    data = external.with_name("model.onnx.data")
    data.write_bytes(data.read_bytes()[:-4])
    with pytest.raises(ModelError, match=r"too short: weight 'weight' ends at byte 16,384, and the file has 16,380"):
        open_graph(external)


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "sub/../../secret"])
def test_external_data_outside_the_folder(external: Path, location: str) -> None:
    (external.parent.parent / "secret").write_bytes(bytes(1 << 16))
    model = ir.load(external)
    (weight,) = model.graph.initializers.values()
    weight.const_value = ir.ExternalTensor(
        location, 0, 1 << 14, ir.DataType.FLOAT, shape=ir.Shape([64, 64]), name="weight", base_dir=external.parent
    )
    ir.save(model, external)
    with pytest.raises(ModelError, match="outside the model's folder"):
        open_graph(external)


def test_unknown_operator_domain(write_model: WriteModel) -> None:
    path = write_model(
        '<ir_version: 8, opset_import: ["" : 17, "com.acme" : 1]>'
        "g (float[2] x) => (float[2] y) { y = com.acme.Frobnicate(x) }"
    )
    with pytest.raises(
        ModelError, match=r"makes 'y' is the operator com.acme.Frobnicate, .* any of the domain 'com.acme'"
    ):
        open_graph(path)


def test_unknown_operator_of_a_known_domain(write_model: WriteModel) -> None:
    path = write_model('<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) { y = Frobnicate(x) }')
    with pytest.raises(ModelError, match=r"is the operator Frobnicate, which ONNX Runtime does not know$"):
        open_graph(path)


def test_functions_are_inlined(write_model: WriteModel) -> None:
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17, "local" : 1]>
        g (float[2] x) => (float[2] y) { y = local.twice(x) }
        <opset_import: ["" : 17], domain: "local"> twice (a) => (b) { b = Add(a, a) }"""
    )
    assert [node.op_type for node in open_graph(path).nodes] == ["Add"]


def test_constants_and_overridable_initializers_become_weights(write_model: WriteModel) -> None:
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[2] x, float[2] w) => (float[2] y) <float[2] w = {1, 2}>
        { c = Constant <value = float[2] {3, 4}> ()
          a = Add(x, w)
          y = Mul(a, c) }"""
    )
    graph = open_graph(path)
    assert [node.op_type for node in graph.nodes] == ["Add", "Mul"]
    assert [value.name for value in graph.graph.inputs] == ["x"]
    assert {value.name for node in graph.nodes for value in graph.weights(node)} == {"w", "c"}


def test_outputs_that_are_inputs_or_weights_keep_their_names(write_model: WriteModel) -> None:
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[2] x) => (float[2] x, float[2] w, float[2] y) <float[2] w = {1, 2}> { y = Add(x, w) }"""
    )
    graph = open_graph(path)
    assert [value.name for value in graph.graph.inputs] == ["x"]
    assert [value.name for value in graph.outputs] == ["x", "w", "y"]
    assert [value.name for value in graph.graph.outputs] == ["w", "y"]
    assert all(value.producer() is not None for value in graph.graph.outputs)


def test_model_that_computes_nothing(write_model: WriteModel) -> None:
    path = write_model('<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] x) { }')
    with pytest.raises(ModelError, match="all its outputs are inputs"):
        open_graph(path)


def test_captured_values_are_read(write_model: WriteModel) -> None:
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[2] x, bool c) => (float[2] y) <float[2] w = {1, 2}>
        { a = Neg(x)
          y = If(c) <
            then_branch = t () => (float[2] u) { u = Add(a, w) },
            else_branch = e () => (float[2] v) { v = Identity(a) } > }"""
    )
    graph = open_graph(path)
    assert {value.name for value in graph.reads[graph.nodes[-1]]} == {"a", "w", "c"}
