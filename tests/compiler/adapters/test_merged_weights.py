"""Merged adapters: packages agree with the unsplit model that has the sums in its weights."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper
import onnx_ir as ir
import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.adapters.linear_layers import find_linear_layers
from splitc.runtime import MisuseError, Session
from splitc.runtime.package.manifest import MergedAdapter
from splitc.runtime.package.manifest_file import read_manifest
from tests.conftest import LAYER, assert_close, decoder_feeds, run_whole
from tests.helpers.adapters import Pairs, product, random_pairs, write_kohya, write_peft
from tests.helpers.blocks import FLOAT, Block
from tests.helpers.command import splitc
from tests.helpers.graphs import read_graph

WIDE, NARROW = 48, 16
# How each layer's weight is stored, and the update that it takes, from B A.
WAYS = ("matmul", "gemm", "gemm_turned", "fused", "transposed", "halves", "conv1", "conv3")


def layers(b: Block) -> None:
    """Blocks with a layer of each kind, up and down, and a final average pool."""
    value = b.data("x", (2, 5, NARROW), ["batch", "n", NARROW])
    flat = b.ints(-1, NARROW)
    for block in range(2):
        with b.scope(f"blocks.{block}"):
            for way in WAYS[:6]:
                name = f"blocks.{block}.{way}"
                up, rows = b.op("MatMul", value, b.w(f"{name}.up.weight", NARROW, WIDE)), b.op("Shape", value)
                made = product_of(b, way, b.op("Tanh", up), f"{name}.down.weight")
                made = b.op("Reshape", b.op("Reshape", made, flat), rows)
                value = b.op("Add", value, made)
            picture = b.op("Unsqueeze", b.op("Transpose", value, perm=[0, 2, 1]), b.ints(3))
            for way, kernel in (("conv1", 1), ("conv3", 3)):
                weight = b.w(f"blocks.{block}.{way}.weight", NARROW, NARROW, kernel, kernel)
                picture = b.op("Add", picture, b.op("Conv", picture, weight, pads=[kernel // 2] * 4))
            value = b.op("Transpose", b.op("Squeeze", picture, b.ints(3)), perm=[0, 2, 1])
    value = b.op("MatMul", value, b.w("head.weight", NARROW, NARROW))  # which no adapter changes
    b.give(value, "y", ["batch", "n", NARROW])


def product_of(b: Block, way: str, value: ir.Value, name: str) -> ir.Value:
    """A product with a weight of [WIDE, NARROW], stored in this form."""
    if way == "matmul":
        return b.op("MatMul", value, b.w(name, WIDE, NARROW))
    if way == "transposed":
        return b.op("MatMul", value, b.op("Transpose", b.w(name, NARROW, WIDE), perm=[1, 0]))
    if way == "halves":
        half = b.weight(name, ir.tensor(b.random(name, WIDE, NARROW).astype(np.float16)))
        return b.op("MatMul", value, b.op("Cast", half, to=int(FLOAT)))
    if way == "fused":
        return b.op("com.microsoft.FusedMatMul", value, b.w(name, NARROW, WIDE), transB=1, alpha=0.5)
    rows = b.op("Reshape", value, b.ints(-1, WIDE))
    if way == "gemm":
        return b.op("Gemm", rows, b.w(name, WIDE, NARROW), alpha=2.0)
    return b.op("Gemm", rows, b.w(name, NARROW, WIDE), transB=1)


def changed(model: onnx.ModelProto, pairs: Pairs, scale: float) -> onnx.ModelProto:
    """The model with the updates added to its weights by numpy."""
    factors = {"gemm.down": 2.0, "fused.down": 0.5}
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for tensor in made.graph.initializer:
        module = tensor.name.removesuffix(".weight")
        if module in pairs:
            weight = onnx.numpy_helper.to_array(tensor)
            update = product(pairs[module]) * scale
            update = update if update.shape == weight.shape else update.T
            factor = next((factor for end, factor in factors.items() if module.endswith(end)), 1.0)
            sums = (weight.astype(np.float32) + update / factor).astype(weight.dtype)
            tensor.CopyFrom(onnx.numpy_helper.from_array(sums, tensor.name))
    return made


def sizes() -> Mapping[str, tuple[int, ...]]:
    down = {f"blocks.{n}.{way}.down": (WIDE, NARROW) for n in range(2) for way in WAYS[:6]}
    up = {f"blocks.{n}.{way}.up": (NARROW, WIDE) for n in range(2) for way in WAYS[:6]}
    convolutions = {f"blocks.{n}.conv{k}": (NARROW, NARROW, k, k) for n in range(2) for k in (1, 3)}
    return {**down, **up, **convolutions}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, npt.NDArray[Any]]]:
    b = Block()
    layers(b)
    path = tmp_path_factory.mktemp("layers") / "model.onnx"
    model = b.model()
    ir.save(model, path.with_name("whole.onnx"))
    ir.save(model, path, external_data="model.data")
    path.with_name("again").hardlink_to(path.with_name("model.data"))  # as a package of --weights link has one
    return path, b.feeds


@pytest.mark.parametrize(
    ("mode", "shares"),
    [("layer", (1, 1)), ("tensor", (5, 1, 1)), ("batch", (1, 1))],
)
def test_packages_have_the_sums(
    model: tuple[Path, Mapping[str, npt.NDArray[Any]]], mode: str, shares: tuple[int, ...], tmp_path: Path
) -> None:
    path, feeds = model
    pairs = random_pairs(sizes(), size=0.1)
    first = write_peft(tmp_path / "style", pairs)  # its scale is 2
    second = write_kohya(tmp_path / "pose.safetensors", random_pairs(sizes(), 2, seed=1, size=0.1), alpha=1)
    split = None if mode == "layer" else shares
    request = Request(split_mode=mode, lora=[(str(first), 0.5), (str(second), 1.0)], tensor_split=split)
    plan = plan_model(path, f"{len(shares)}xcpu", request)
    assert not plan.warnings
    said: list[str] = []
    manifest = compile_model(plan, tmp_path / "package", say=said.append)
    assert manifest.merged == [
        MergedAdapter("style", 0.5, len(pairs)),
        MergedAdapter("pose.safetensors", 1.0, len(pairs)),
    ]
    assert mode == "layer" or any(re.search("outputs? agrees? with the unsplit model", line) for line in said)
    whole = changed(onnx.load(path.with_name("whole.onnx")), pairs, 2 * 0.5)
    whole = changed(whole, random_pairs(sizes(), 2, seed=1, size=0.1), 0.5)
    onnx.save(whole, tmp_path / "merged.onnx")
    with Session(tmp_path / "package") as session:
        given = session.run(dict(feeds))
    assert_close(given, run_whole(tmp_path / "merged.onnx", dict(feeds)))
    assert np.abs(given["y"] - run_whole(path, dict(feeds))["y"]).max() > 0.1


def test_one_weight_is_in_memory_at_a_time(model: tuple[Path, Any], tmp_path: Path) -> None:
    adapter = write_peft(tmp_path / "style", random_pairs(sizes()))
    plan = plan_model(model[0], ["cpu0"], Request(lora=[(str(adapter), 1.0)]))
    weights = [value.const_value for value in plan.analysis.graph.graph.initializers.values()]
    merged = [tensor for tensor in weights if isinstance(tensor, ir.LazyTensor)]
    assert len(merged) == len(sizes())
    assert merged[0].numpy() is not merged[0].numpy(), "it is not kept"


def test_a_plan_keeps_its_adapters(decoder: Path, tmp_path: Path) -> None:
    sizes = {f"model.layers.{layer}.self_attn.q_proj": (64, 64) for layer in range(2)}
    adapter = write_peft(tmp_path / "style", random_pairs(sizes))
    shown = splitc("plan", decoder, "-d", "2xcpu", "--lora", f"{adapter}:0.5", "-o", tmp_path / "plan.json").stdout
    assert f"adapter {adapter}, x 0.5: merged into 2 of 15 layers" in " ".join(shown.split())
    splitc("compile", decoder, "--plan", tmp_path / "plan.json", "-o", tmp_path / "package")
    assert read_manifest(tmp_path / "package").merged == [MergedAdapter("style", 0.5, 2)]
    again = ("compile", decoder, "--plan", tmp_path / "plan.json", "-o", tmp_path / "other", "--lora", adapter)
    assert "--lora says" in splitc(*again, code=2).stderr
    with Session(tmp_path / "package") as session:
        given = session.run(decoder_feeds())
    compile_model(plan_model(decoder, "2xcpu", LAYER), tmp_path / "plain", verify=False)
    with Session(tmp_path / "plain") as session:
        assert np.abs(given["logits"] - session.run(decoder_feeds())["logits"]).max() > 0.01


def test_what_has_no_layer_is_a_warning(decoder: Path, tmp_path: Path) -> None:
    modules = {"model.layers.0.self_attn.q_proj": (64, 64), "model.layers.9.self_attn.q_proj": (64, 64)}
    adapter = write_peft(tmp_path / "style", random_pairs(modules))
    plan = plan_model(decoder, ["cpu0"], Request(lora=[(str(adapter), 1.0)]))
    (warning,) = plan.warnings
    assert warning.startswith(f"1 of 2 updates of the adapter {adapter} are left out, such as '")
    assert warning.endswith("model.layers.9.self_attn.q_proj': no layer has its name")
    with pytest.raises(MisuseError, match=r"another model's: .* no layer has its name\. Layers that take adapters: "):
        plan_model(
            decoder, ["cpu0"], Request(lora=[(str(write_peft(tmp_path / "x", random_pairs({"h.0.q": (64, 64)}))), 1)])
        )


@pytest.mark.parametrize(
    ("number", "strength", "why"),
    [
        (
            np.nan,
            1.0,
            r"style has numbers for 'base_model\.model\.blocks\.0\.gemm\.down' that are not finite",
        ),
        (-np.inf, 1.0, r"has numbers for '.*gemm\.down' that are not finite"),
        (1.0, 1e39, r"down' times 2e\+39, makes numbers that are not finite in float"),
        (1.0, 1e6, r"halves\.down' times 2e\+06, makes numbers that are not finite in float16, the type of blocks\.1"),
    ],
)
def test_adapters_that_make_weights_infinite_are_refused(
    number: float, strength: float, why: str, model: tuple[Path, Any], tmp_path: Path
) -> None:
    """Those with such numbers are before there is a plan. Nothing warns before."""
    pairs = random_pairs({"blocks.0.gemm.down": (WIDE, NARROW), "blocks.1.halves.down": (WIDE, NARROW)})
    pairs["blocks.0.gemm.down"][0][0, 0] = number
    adapter = write_peft(tmp_path / "style", pairs)
    with warnings.catch_warnings(), pytest.raises(MisuseError, match=why):
        warnings.simplefilter("error", RuntimeWarning)
        plan = plan_model(model[0], "2xcpu", Request(split_mode="layer", lora=[(str(adapter), strength)]))
        assert np.isfinite(number)
        compile_model(plan, tmp_path / "package")
    assert not (tmp_path / "package").exists()


def test_weights_that_take_none(tmp_path: Path) -> None:
    """Quantized ones, and those that several layers read, since the other layers would change too."""
    b = Block()
    value = b.data("x", (2, NARROW), ["n", NARROW])
    shared = b.w("shared.0.weight", NARROW, NARROW)
    value = b.op("MatMul", b.op("Tanh", b.op("MatMul", value, shared)), shared)
    whole = b.weight("packed.0.weight", ir.tensor(np.ones((NARROW, NARROW), np.int8)))
    scale = b.weight("scale", ir.tensor(np.float32(0.1)))
    value = b.op("MatMul", value, b.op("DequantizeLinear", whole, scale))
    b.give(b.op("MatMul", value, b.w("plain.0.weight", NARROW, NARROW)), "y", ["n", NARROW])
    ir.save(b.model(), tmp_path / "model.onnx")
    pairs = random_pairs({f"{name}.0": (NARROW, NARROW) for name in ("shared", "packed", "plain")})
    adapter = write_peft(tmp_path / "style", pairs)
    plan = plan_model(tmp_path / "model.onnx", ["cpu0"], Request(lora=[(str(adapter), 1.0)]))
    (merged,) = plan.analysis.merged
    assert {name.split(".")[2]: why for name, why in merged.matches.unmatched.items()} == {
        "shared": "its weight has other readers",
        "packed": "its weight is quantized: --lora-slots adds adapters beside it",
    }
    assert list(merged.weights) == ["plain.0.weight"]


def test_kernels_whose_axes_are_turned_around_are_no_layers(tmp_path: Path) -> None:
    """A Transpose without an order reverses all axes, not those of a matrix alone."""
    b = Block()
    kernel = b.op("Transpose", b.w("conv.0.weight", 3, 8, 16))
    b.give(b.op("Conv", b.data("x", (1, 8, 20)), kernel), "y", [1, 16, 18])
    ir.save(b.model(), tmp_path / "model.onnx")
    assert find_linear_layers(read_graph(tmp_path / "model.onnx")) == []
