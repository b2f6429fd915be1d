"""Reading models: what is refused, and with which message."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

from models.llama import Size, build, save_sparse
from models.writer import Writer, save
from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.errors import ModelError
from splitc.compiler.packaging import package
from splitc.compiler.packaging.writer import PackageWriter
from splitc.compiler.reading.loading import read_model
from splitc.runtime import Session
from splitc.runtime.cli.app import app
from tests.conftest import LAYER, run_whole
from tests.helpers.command import splitc

WriteModel = Callable[[str], Path]


def test_file_in_the_format_of_onnxruntime_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.ort").write_bytes(b"\x18\0\0\0ORTM" + bytes(40))
    with pytest.raises(ModelError, match=r"in ONNX Runtime's own format \(.ort\): name the ONNX file"):
        read_model(tmp_path / "model.ort")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such model file"):
        read_model(tmp_path / "none.onnx")


NOT_ONNX = [("bad.onnx", content) for content in (b"", b"not a model", b"\x00" * 100, b"PK\x03\x04")]
# By these names, onnx takes a file for a model in another format.
NOT_ONNX += [("config.json", b'{"base_code": 1}'), ("model.pbtxt", b"layer {"), ("model.onnxtxt", b"agraph")]


@pytest.mark.parametrize(("name", "content"), NOT_ONNX)
def test_not_onnx(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ModelError, match="is not an ONNX model"):
        read_model(path)


def test_file_that_is_too_large(package: Path, tmp_path: Path) -> None:
    """A sparse file, which takes no disk space and is not read."""
    path = tmp_path / "large.onnx"
    with path.open("wb") as file:
        file.truncate(3 << 30)
    said = r"it has 3.00 GiB \(3,221,225,472 bytes\), and .* less than 2 GiB .*save_as_external_data=True"
    with pytest.raises(ModelError, match=said):
        read_model(path)
    for command in (["check", package, "--model", path], ["bench", package, "--baseline", path, "--runs", "1"]):
        assert "save_as_external_data=True" in splitc(*command, code=1).stderr


def test_model_of_more_bytes_than_may_be_allocated(tmp_path: Path) -> None:
    """Its weights are mapped; nothing of their size is allocated."""
    path = tmp_path / "large.onnx"
    save_sparse(build(Size(layers=8, hidden=8192, heads=64, feed_forward=28672)), path)
    size = path.with_name("large.onnx.data").stat().st_size
    program = f"""
import resource
from pathlib import Path
from splitc.runtime.engines.onnx_session import load_unoptimized
resource.setrlimit(resource.RLIMIT_AS, ({int(1.5 * size)}, {int(1.5 * size)}))
load_unoptimized(Path({str(path)!r}))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


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
        read_model(external)


def test_external_data_too_short(external: Path) -> None:
    data = external.with_name("model.onnx.data")
    data.write_bytes(data.read_bytes()[:-4])
    with pytest.raises(ModelError, match=r"too short: weight 'weight' ends at byte 16,384, and the file has 16,380"):
        read_model(external)


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
        read_model(external)


def test_unknown_operator_domain(write_model: WriteModel) -> None:
    path = write_model(
        '<ir_version: 8, opset_import: ["" : 17, "com.acme" : 1]>'
        "g (float[2] x) => (float[2] y) { y = com.acme.Frobnicate(x) }"
    )
    with pytest.raises(
        ModelError, match=r"makes 'y' is the operator com.acme.Frobnicate, .* any of the domain 'com.acme'"
    ):
        read_model(path)


def test_unknown_operator_of_a_known_domain(write_model: WriteModel) -> None:
    path = write_model('<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) { y = Frobnicate(x) }')
    with pytest.raises(ModelError, match=r"is the operator Frobnicate, which ONNX Runtime does not know$"):
        read_model(path)


def test_outputs_of_maps(tmp_path: Path) -> None:
    """As skl2onnx writes a classifier's probabilities. The model is valid ONNX."""
    zipped = helper.make_node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml", classlabels_int64s=[0, 1])
    number = helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    maps = helper.make_sequence_type_proto(helper.make_map_type_proto(TensorProto.INT64, number))
    ends = [helper.make_value_info("y", maps)]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 1)]
    model = helper.make_model(helper.make_graph([zipped], "zipped", inputs, ends), opset_imports=opsets, ir_version=8)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=r"model.onnx: 'y' has maps as elements, .* with the option zipmap=False"):
        read_model(tmp_path / "model.onnx")


def test_external_data_of_which_the_model_gives_too_little(external: Path) -> None:
    proto = onnx.load(external, load_external_data=False)
    next(entry for entry in proto.graph.initializer[0].external_data if entry.key == "length").value = "16000"
    external.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match=r"'weight' takes 16,384 bytes, and the model gives it 16,000 of model.onnx"):
        read_model(external)


def layers() -> onnx.ModelProto:
    """Three blocks of two products each, as a model that can be broken."""
    generator = np.random.default_rng(0)
    nodes, weights, x = [], [], "x"
    for n in range(3):
        for name, shape in (("up", (32, 64)), ("down", (64, 32)), ("bias", (32,))):
            array = generator.standard_normal(shape).astype(np.float32)
            weights.append(numpy_helper.from_array(array, f"{name}{n}"))
        nodes += [
            helper.make_node("MatMul", [x, f"up{n}"], [f"h{n}"], f"up{n}"),
            helper.make_node("Relu", [f"h{n}"], [f"r{n}"], f"relu{n}"),
            helper.make_node("MatMul", [f"r{n}", f"down{n}"], [f"d{n}"], f"down{n}"),
            helper.make_node("Add", [f"d{n}", f"bias{n}"], [f"e{n}"], f"bias{n}"),
            helper.make_node("Add", [x, f"e{n}"], [f"x{n}"], f"add{n}"),
        ]
        x = f"x{n}"
    nodes.append(helper.make_node("Identity", [x], ["y"]))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 32]) for name in "xy"]
    graph = helper.make_graph(nodes, "layers", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert isinstance(model, onnx.ModelProto)
    return model


def node(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.name == name)


def weight(model: onnx.ModelProto, name: str) -> onnx.TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def future_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 99


def future_ir_version(model: onnx.ModelProto) -> None:
    model.ir_version = 99


def operator_newer_than_its_opset(model: onnx.ModelProto) -> None:
    node(model, "relu1").op_type = "Gelu"


def too_many_inputs(model: onnx.ModelProto) -> None:
    node(model, "relu1").input.append("bias1")


def too_few_inputs(model: onnx.ModelProto) -> None:
    node(model, "up1").input.pop()


def unknown_attribute(model: onnx.ModelProto) -> None:
    node(model, "relu1").attribute.append(helper.make_attribute("slope", 0.5))


def attribute_of_another_type(model: onnx.ModelProto) -> None:
    node(model, "relu1").op_type = "Softmax"
    node(model, "relu1").attribute.append(helper.make_attribute("axis", "last"))


def missing_attribute(model: onnx.ModelProto) -> None:
    node(model, "relu1").op_type = "Cast"


def mismatched_types(model: onnx.ModelProto) -> None:
    weight(model, "bias1").CopyFrom(numpy_helper.from_array(np.zeros(32, np.int64), "bias1"))


def mismatched_shapes(model: onnx.ModelProto) -> None:
    weight(model, "bias1").CopyFrom(numpy_helper.from_array(np.zeros(31, np.float32), "bias1"))


def negative_dimension(model: onnx.ModelProto) -> None:
    weight(model, "bias1").dims[0] = -32


def data_shorter_than_the_weight(model: onnx.ModelProto) -> None:
    weight(model, "bias1").raw_data = weight(model, "bias1").raw_data[:-8]


def cycle(model: onnx.ModelProto) -> None:
    node(model, "up0").input[0] = "x2"


def value_that_nothing_makes(model: onnx.ModelProto) -> None:
    node(model, "up1").input[0] = "nobody"


def output_that_nothing_makes(model: onnx.ModelProto) -> None:
    model.graph.output[0].name = "nobody"


def branches_missing(model: onnx.ModelProto) -> None:
    node(model, "relu1").op_type = "If"


def function_that_calls_itself(model: onnx.ModelProto) -> None:
    call, opset = helper.make_node("Again", ["a"], ["b"], domain="local"), helper.make_opsetid("local", 1)
    model.functions.append(helper.make_function("local", "Again", ["a"], ["b"], [call], [opset]))
    model.opset_import.append(opset)
    node(model, "relu1").op_type, node(model, "relu1").domain = "Again", "local"


BROKEN = [
    future_opset,
    future_ir_version,
    operator_newer_than_its_opset,
    too_many_inputs,
    too_few_inputs,
    unknown_attribute,
    attribute_of_another_type,
    missing_attribute,
    mismatched_types,
    mismatched_shapes,
    negative_dimension,
    data_shorter_than_the_weight,
    cycle,
    value_that_nothing_makes,
    output_that_nothing_makes,
    branches_missing,
    function_that_calls_itself,
]
OTHERS = ("layer", "row", "tensor")


@pytest.mark.parametrize(
    ("break_it", "mode"),
    [(break_it, mode) for number, break_it in enumerate(BROKEN) for mode in ("auto", OTHERS[number % len(OTHERS)])],
)
def test_model_that_nothing_can_load_is_refused(
    break_it: Callable[[onnx.ModelProto], None], mode: str, tmp_path: Path
) -> None:
    """Modes differ only after ONNX Runtime has loaded the model: each damage is tried in two of them."""
    if break_it is function_that_calls_itself and onnxruntime.__version__.startswith("1.23."):
        pytest.skip("ONNX Runtime 1.23 crashes on a function that calls itself")
    model = layers()
    break_it(model)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    arguments = ["compile", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "package"), "-d", "2xcpu"]
    result = CliRunner().invoke(app, [*arguments, "--split-mode", mode])
    assert isinstance(result.exception, ModelError)
    assert str(result.exception).startswith(f"ONNX Runtime can't load {tmp_path / 'model.onnx'}: ")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("mode", ["layer", "row", "tensor"])
def test_type_that_the_provider_lacks_is_refused(mode: str, tmp_path: Path) -> None:
    model = layers()
    model.graph.node[-1].CopyFrom(helper.make_node("Cast", ["x2"], ["c"], to=TensorProto.INT64))
    # By its definition it takes this type, and ONNX Runtime has no kernel for it.
    model.graph.node.append(helper.make_node("Relu", ["c"], ["i"], "whole"))
    model.graph.node.append(helper.make_node("Cast", ["i"], ["y"], to=TensorProto.FLOAT))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    least: dict[str, Any] = {"row_min": 8} if mode == "row" else {}
    with pytest.raises(ModelError, match=r"Could not find an implementation for Relu\(14\) node with name 'whole'"):
        compile_model(
            plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode=mode, **least)), tmp_path / "package"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_package_is_loaded_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """A fault of splitc makes an engine that can't be loaded. In tensor mode packages are also compared."""
    (tmp_path / "model.onnx").write_bytes(layers().SerializeToString())
    plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode=mode))

    def write_and_break(written: object, writer: PackageWriter, *more: Any) -> None:
        write(written, writer, *more)  # type: ignore[arg-type]
        (file,) = (writer.folder / "rank1").glob("*.onnx")
        broken = onnx.load(file, load_external_data=False)
        broken.graph.node[0].op_type = "Gelu"
        onnx.save(broken, file)

    write = package._write_weights
    monkeypatch.setattr(package, "_write_weights", write_and_break)
    with pytest.raises(ModelError, match=r"(?s)can't load rank1/stage\d.onnx, which was made of model.onnx: .*Gelu"):
        compile_model(plan, tmp_path / "package")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_weight_that_is_there_twice(tmp_path: Path) -> None:
    """ONNX Runtime takes the first of two large ones and the last of two small ones."""
    model = layers()
    model.graph.initializer.append(weight(model, "bias1"))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    read_model(tmp_path / "model.onnx")
    model.graph.initializer[-1].CopyFrom(numpy_helper.from_array(np.ones(32, np.float32), "bias1"))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=r"'bias1' is the name of two values in 'layers': give one of them another"):
        read_model(tmp_path / "model.onnx")


def test_value_that_is_made_twice(tmp_path: Path) -> None:
    model = layers()
    node(model, "relu1").output[0] = "h0"
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=r"'h0' is the name of two values"):
        read_model(tmp_path / "model.onnx")


BRANCH = """<ir_version: 8, opset_import: ["" : 17]>
    g ({inputs}) => (float[2] y) <float[2] w = {{1, 2}}>
    {{ a = Add(x, w)
      y = If(c) <
        then_branch = t () => (float[2] u) <float[2] w = {{{inner}}}> {{ u = Mul(a, w) }},
        else_branch = e () => (float[2] v) {{ v = Identity(a) }} > }}"""


@pytest.mark.parametrize(
    ("inputs", "inner"), [("float[2] x, bool c", "3, 4"), ("float[2] x, bool c, float[2] w", "1, 2")]
)
def test_weight_inside_a_branch_with_a_name_from_outside(write_model: WriteModel, inputs: str, inner: str) -> None:
    """ONNX Runtime takes the outer weight; ONNX defines that the inner one counts."""
    with pytest.raises(ModelError, match=r"'w' is the name of two values in 't'"):
        read_model(write_model(BRANCH.format(inputs=inputs, inner=inner)))


def test_weight_that_is_copied_into_a_branch(write_model: WriteModel, tmp_path: Path) -> None:
    """As onnxslim writes loops."""
    path = write_model(BRANCH.format(inputs="float[2] x, bool c", inner="1, 2"))
    compile_model(plan_model(path, ["cpu0"], LAYER), tmp_path / "package")
    with Session(tmp_path / "package") as session:
        for branch in (True, False):
            feeds = {"x": np.array([3, 4], np.float32), "c": np.array(branch)}
            np.testing.assert_array_equal(session.run(feeds)["y"], run_whole(path, feeds)["y"])


def sparse_tensor(name: str, places: Any, shape: Sequence[int]) -> onnx.SparseTensorProto:
    """A tensor of 2, 3, ... at these places, and of 0 elsewhere."""
    values = numpy_helper.from_array(np.arange(2, 2 + len(places), dtype=np.float32), name)
    return helper.make_sparse_tensor(values, numpy_helper.from_array(np.array(places, np.int64), f"{name}_at"), shape)


def test_sparse_weights_and_constants_are_plain_ones(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "rare"], ["wide"]),
        helper.make_node("Constant", [], ["few"], sparse_value=sparse_tensor("few", [1, 4], [6])),
        helper.make_node("Add", ["wide", "few"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size]) for name, size in (("x", 4), ("y", 6)))
    graph = helper.make_graph(nodes, "g", [x], [y])
    graph.sparse_initializer.append(sparse_tensor("rare", [[0, 5], [3, 2]], [4, 6]))
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    compile_model(plan_model(path, ["2xcpu"], Request(split_mode="tensor", shapes={"x": (2, 4)})), tmp_path / "package")
    feeds = {"x": np.arange(8, dtype=np.float32).reshape(2, 4)}
    with Session(tmp_path / "package") as session:
        np.testing.assert_array_equal(session.run(feeds)["y"], run_whole(path, feeds)["y"])


@pytest.mark.parametrize(
    ("shape", "said"), [([1], "has elements outside of its shape"), ([1 << 20, 1 << 20], "takes 2 GiB or more")]
)
def test_sparse_weights_that_are_damaged_are_named(shape: list[int], said: str, tmp_path: Path) -> None:
    model = layers()
    model.graph.sparse_initializer.append(sparse_tensor("rare", [7], [8]))
    model.graph.sparse_initializer[0].dims[:] = shape
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=f"the sparse tensor 'rare' {said}"):
        read_model(tmp_path / "model.onnx")
