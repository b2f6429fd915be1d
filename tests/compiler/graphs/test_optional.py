"""Optional inputs: initializers that are also inputs have default values that requests override, in all modes."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from models.writer import save
from splitc.compiler import Plan, Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.errors import FeedError
from splitc.runtime.package.manifest_file import read_manifest
from tests.compiler.sharding.test_random_blocks import RandomBlock
from tests.conftest import Arrays, assert_close, decoder_feeds, run_whole
from tests.helpers.blocks import Block

MODES = [
    ("layer", (1, 1)),
    ("row", (5, 1)),
    ("tensor", (1, 8, 1)),
]


def make_optional(source: Path, target: Path, but: Collection[ir.DataType] = ()) -> dict[str, np.ndarray]:
    """Write the model with its initializers as inputs, except those of the types `but`. Returns their values."""
    model = ir.load(source)
    constants = {}
    for value in model.graph.initializers.values():
        assert value.const_value is not None
        if value.dtype not in but:
            value.shape = ir.Shape(value.const_value.shape.numpy())
            value.type = ir.TensorType(value.const_value.dtype)
            model.graph.inputs.append(value)
            constants[value.name or ""] = value.const_value.numpy()
    ir.save(model, target, external_data="weights")
    return constants


def others(values: dict[str, np.ndarray], seed: int) -> Arrays:
    """Other values for some of the floating-point initializers."""
    generator = np.random.default_rng(seed)
    floats = [name for name, array in values.items() if array.dtype == np.float32]
    chosen = generator.choice(floats, size=max(1, len(floats) // 2), replace=False)
    return {str(n): (values[n] * generator.uniform(0.5, 1.5, values[n].shape)).astype(np.float32) for n in chosen}


def decide(model: Path, feeds: Arrays, mode: str, shares: tuple[int, ...]) -> Plan:
    shapes = {name: array.shape for name, array in feeds.items()}
    least: dict[str, Any] = {"row_min": 2} if mode == "row" else {}
    request = Request(shapes=shapes, split_mode=mode, tensor_split=shares, memory=["1GiB"], **least)
    return plan_model(model, [f"{len(shares)}xcpu"], request)


def split(model: Path, package: Path, feeds: Arrays, mode: str, shares: tuple[int, ...]) -> Plan:
    plan = decide(model, feeds, mode, shares)
    compile_model(plan, package, force=True, verify=False)
    return plan


@pytest.mark.parametrize(("seed", "mode", "shares"), [(2, *each) for each in MODES] + [(0, "tensor", (1, 1))])
def test_random_blocks_take_other_weights(seed: int, mode: str, shares: tuple[int, ...], tmp_path: Path) -> None:
    block = RandomBlock(seed)
    save(block.model(), tmp_path / "plain.onnx")
    values = make_optional(tmp_path / "plain.onnx", tmp_path / "model.onnx", but=[ir.DataType.INT64])
    plan = split(tmp_path / "model.onnx", tmp_path / "package", block.feeds, mode, shares)
    plain = decide(tmp_path / "plain.onnx", block.feeds, mode, shares)
    assert [(w.name, w.split) for w in plan.weights] == [(w.name, w.split) for w in plain.weights]
    with Session(tmp_path / "package") as session:
        assert {tensor.name for tensor in session.optional} == set(values)
        for given in ({}, others(values, seed), others(values, seed + 1)):
            feeds = {**block.feeds, **given}
            assert_close(session.run(feeds), run_whole(tmp_path / "model.onnx", feeds), 2e-5)


def test_sequence_takes_other_weights(decoder: Path, tmp_path: Path) -> None:
    values = make_optional(decoder, tmp_path / "model.onnx", but=[ir.DataType.INT64])
    given = others(values, 0)
    feeds = decoder_feeds(past=0)
    whole = run_whole(tmp_path / "model.onnx", {**feeds, **given})
    split(tmp_path / "model.onnx", tmp_path / "package", feeds, "tensor", (2, 1))
    fed = {name: array for name, array in feeds.items() if not name.startswith("past")}
    with Session(tmp_path / "package") as session, session.start() as sequence:
        made = sequence.run({**fed, **given})
        assert_close(made, {name: whole[name] for name in made}, 2e-5)


def sized() -> Block:
    """Sizes that depend on an optional input: a number of pieces, and a scale."""
    block = Block()
    x = block.data("x", (3, 32), ["n", 32])
    pieces = block.weight("pieces", ir.tensor(np.array([0, 4, -1], np.int64)))
    times = block.weight("times", ir.tensor(np.array(2, np.float32)))
    for layer in range(3):
        inner = block.op("Relu", block.op("MatMul", x, block.w(f"up{layer}", 32, 48)))
        x = block.op("Add", x, block.op("MatMul", inner, block.w(f"down{layer}", 48, 32)))
    cut = block.op("ReduceMax", block.op("Mul", block.op("Reshape", x, pieces), times), axes=[2], keepdims=0)
    block.give(cut, shape=["n", "pieces"])
    return block


@pytest.mark.parametrize(("mode", "shares"), MODES)
def test_sizes_may_follow_from_optional_inputs(mode: str, shares: tuple[int, ...], tmp_path: Path) -> None:
    block = sized()
    save(block.model(), tmp_path / "plain.onnx")
    make_optional(tmp_path / "plain.onnx", tmp_path / "model.onnx")
    plan = split(tmp_path / "model.onnx", tmp_path / "package", block.feeds, mode, shares)
    assert not any("depend on data" in warning for warning in plan.warnings)
    with Session(tmp_path / "package") as session:
        for given in ({}, {"pieces": np.array([0, 8, -1])}, {"times": np.array(3, np.float32)}):
            feeds = {**block.feeds, **given}
            assert_close(session.run(feeds), run_whole(tmp_path / "model.onnx", feeds))


@pytest.mark.parametrize(("mode", "shares"), MODES)
def test_shape_may_be_another_where_the_model_says_so(mode: str, shares: tuple[int, ...], tmp_path: Path) -> None:
    block = Block()
    x = block.data("x", (3, 32), ["n", 32])
    bias = block.weight("bias", ir.tensor(np.ones((1, 48), np.float32)))
    inner = block.op("Relu", block.op("Add", block.op("MatMul", x, block.w("up", 32, 48)), bias))
    block.give(block.op("MatMul", inner, block.w("down", 48, 32)), shape=["n", 32])
    model = block.model()
    bias.shape = ir.Shape(["rows", 48])
    model.graph.inputs.append(bias)
    save(model, tmp_path / "model.onnx")
    split(tmp_path / "model.onnx", tmp_path / "package", block.feeds, mode, shares)
    with Session(tmp_path / "package") as session:
        for given in ({}, {"bias": block.random("other", 3, 48)}):
            feeds = {**block.feeds, **given}
            assert_close(session.run(feeds), run_whole(tmp_path / "model.onnx", feeds))
        with pytest.raises(FeedError, match="input 'bias' has shape 48, and the model takes rows x 48"):
            session.run({**block.feeds, "bias": np.ones(48, np.float32)})
        with pytest.raises(FeedError, match=r"no input scale; it takes .* and may be given bias"):
            session.run({**block.feeds, "scale": np.ones(48, np.float32)})


def test_set_makes_a_constant_of_an_optional_input(tmp_path: Path) -> None:
    block = sized()
    save(block.model(), tmp_path / "plain.onnx")
    make_optional(tmp_path / "plain.onnx", tmp_path / "model.onnx")
    request = Request(split_mode="tensor", settings={"pieces": [0, 8, -1]})
    compile_model(plan_model(tmp_path / "model.onnx", ["2xcpu"], request), tmp_path / "package")
    with Session(tmp_path / "package") as session:
        expected = run_whole(tmp_path / "model.onnx", {**block.feeds, "pieces": np.array([0, 8, -1])})
        assert_close(session.run(block.feeds), expected)
        assert "pieces" not in {tensor.name for tensor in session.optional}


def test_before_version_4_initializers_are_constants(tmp_path: Path) -> None:
    block = sized()
    save(block.model(), tmp_path / "plain.onnx")
    make_optional(tmp_path / "plain.onnx", tmp_path / "model.onnx")
    model = ir.load(tmp_path / "model.onnx")
    old = ir.Model(model.graph, ir_version=3)
    model.graph.opset_imports[""] = 8
    ir.save(old, tmp_path / "old.onnx")
    compile_model(plan_model(tmp_path / "old.onnx", ["2xcpu"], Request(split_mode="layer")), tmp_path / "package")
    assert read_manifest(tmp_path / "package").optional == []


def test_before_version_4_branches_may_read_weights(tmp_path: Path) -> None:
    """A branch's constant, which becomes one of the model's."""
    text = """<ir_version: 3, opset_import: ["" : 17]>
        model (float[n] x, bool flag) => (float[n] y) {
            y = If (flag) <
                then_branch = one () => (float[n] a) { two = Constant <value = float {2.0}> ()  a = Mul (x, two) },
                else_branch = other () => (float[n] b) { b = Neg (x) }
            > }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    compile_model(plan_model(tmp_path / "model.onnx", ["cpu0"], Request(split_mode="layer")), tmp_path / "package")
    fed = {"x": np.array([1, 2], np.float32), "flag": np.array(True)}
    with Session(tmp_path / "package") as session:
        assert_close(session.run(fed), run_whole(tmp_path / "model.onnx", fed))


NORM = """<ir_version: 8, opset_import: ["" : 18]>
norm (float[batch, 8, 16] x, int64[1] axes = {-1}, int64[4] views = {0, 0, 4, 4}) => (float[batch, 8, n] y) <
    float two = {2}, float small = {1e-6}, int64[4] heads = {0, 0, 2, 8}
> {
    squares = Pow (x, two)  mean = ReduceMean <keepdims = 1> (squares, axes)  total = Add (mean, small)
    root = Sqrt (total)  normal = Div (x, root)
    by_heads = Reshape (normal, heads)  other = Reshape (by_heads, views)  last = Constant <value_ints = [-1]> ()
    y = ReduceMax <keepdims = 0> (other, last)
}"""


def test_fusions_do_not_rely_on_default_axes_and_shapes(tmp_path: Path) -> None:
    """The norm was one along the last axis, and the Reshape one by the default shape, whatever a request fed."""
    onnx.save(onnx.parser.parse_model(NORM), tmp_path / "model.onnx")
    x = np.random.default_rng(0).standard_normal((2, 8, 16), np.float32)
    split(tmp_path / "model.onnx", tmp_path / "package", {"x": x}, "layer", (1,))
    with Session(tmp_path / "package") as session:
        for given in ({}, {"axes": np.array([1])}, {"views": np.array([0, 0, 8, 2])}):
            feeds = {"x": x, **given}
            assert_close(session.run(feeds), run_whole(tmp_path / "model.onnx", feeds), 1e-5)
