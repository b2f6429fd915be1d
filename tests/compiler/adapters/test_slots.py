"""Slots for adapters: a model's own, and those added to quantized layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.planning.assembly import slotted_bytes
from splitc.runtime import Session
from splitc.runtime.package.manifest_file import read_manifest
from tests.conftest import assert_close
from tests.helpers.adapters import random_pairs, write_peft
from tests.helpers.blocks import Block
from tests.helpers.command import splitc

WIDTH, INNER, LAYERS = 32, 64, 3
MODES = (("layer", None), ("tensor", [5, 1]), ("batch", None))
SIZES = {
    f"layers.{n}.{part}": sizes
    for n in range(LAYERS)
    for part, sizes in (("up", (WIDTH, INNER)), ("down", (INNER, WIDTH)))
}


def with_own_slots(path: Path, scale: float | None, sum_first: bool) -> Mapping[str, Any]:
    """Blocks whose products have slots, as Olive writes them: A [in, r] and B [r, out] with empty defaults."""
    b = Block()
    added: list[ir.Value] = []

    def layer(value: ir.Value, name: str) -> ir.Value:
        inputs, outputs = SIZES[name]
        made = b.op("MatMul", value, b.w(f"{name}.weight", inputs, outputs))
        pair = []
        for which, shape, declared in (("A", (inputs, 0), (inputs, "r")), ("B", (0, outputs), ("r", outputs))):
            weight = b.weight(f"{name}.lora_{which}.weight", ir.tensor(np.zeros(shape, np.float32)))
            weight.shape = ir.Shape(declared)
            pair.append(weight)
        added.extend(pair)
        update = b.op("MatMul", b.op("MatMul", value, pair[0]), pair[1])
        if scale is not None:
            update = b.op("Mul", update, b.constant(scale, np.float32))
        return b.op("Add", *((update, made) if sum_first else (made, update)))

    value = b.data("x", (2, 5, WIDTH), ["batch", "n", WIDTH])
    for number in range(LAYERS):
        with b.scope(f"layers.{number}"):
            up = b.op("Relu", layer(value, f"layers.{number}.up"))
            value = b.op("Add", value, layer(up, f"layers.{number}.down"))
    b.give(value, "y", ["batch", "n", WIDTH])
    model = b.model()
    model.graph.inputs.extend(added)
    save(model, path)
    return b.feeds


@pytest.mark.parametrize(("scale", "sum_first"), [(None, True), (2.0, False)])
def test_a_models_own_slots(scale: float | None, sum_first: bool, tmp_path: Path) -> None:
    """They are for adapters, not inputs, and are split with their weights. Outputs equal ONNX Runtime's."""
    feeds = dict(with_own_slots(tmp_path / "model.onnx", scale, sum_first))
    pairs = random_pairs(SIZES, 3, size=0.2)
    adapter = write_peft(tmp_path / "style", pairs, lora_alpha=3 * (scale or 1))
    whole = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    given = {
        f"{n}.lora_{'AB'[k]}.weight": np.ascontiguousarray(x.T) for n, pair in pairs.items() for k, x in enumerate(pair)
    }
    expected = dict(zip(["y"], whole.run(["y"], {**feeds, **given}), strict=True))
    plain = dict(zip(["y"], whole.run(["y"], feeds), strict=True))
    assert np.abs(expected["y"] - plain["y"]).max() > 0.1
    for mode, devices, shares in (("layer", "2xcpu", None), ("tensor", "3xcpu", [5, 1, 1])):
        package = tmp_path / f"{mode}{shares}"
        plan = plan_model(tmp_path / "model.onnx", devices, Request(split_mode=mode, tensor_split=shares))
        manifest = compile_model(plan, package, verify=False)
        assert (len(manifest.slots), manifest.optional) == (len(SIZES), [])
        if mode == "tensor":
            assert manifest.collectives == LAYERS
        with Session(package) as session:
            assert session.adapters.load("style", adapter).unmatched == {}
            assert_close(session.run(feeds), plain)
            assert_close(session.run(feeds, adapters="style"), expected)


def test_check_gives_the_models_own_slots_the_same(tmp_path: Path) -> None:
    """Like ONNX Runtime's LoraAdapter. Without the adapter, or with another, outputs differ."""
    model, package = tmp_path / "model.onnx", tmp_path / "package"
    feeds = dict(with_own_slots(model, 2.0, False))
    compile_model(plan_model(model, "2xcpu", Request(split_mode="tensor")), package, verify=False)
    pairs = random_pairs(SIZES, 3, size=0.2)
    arrays = {
        f"{name}.lora_{'AB'[n]}.weight": np.ascontiguousarray(array.T)
        for name, pair in pairs.items()
        for n, array in enumerate(pair)
    }
    file = ort.AdapterFormat()
    file.set_parameters({name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()})
    style = tmp_path / "style.onnx_adapter"
    file.export_adapter(str(style))
    adapter, options = ort.LoraAdapter(), ort.RunOptions()
    adapter.Load(str(style))
    options.add_active_adapter(adapter)
    whole = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    expected = whole.run(["y"], feeds, options)[0]
    with Session(package, adapters=[(str(style), 1.0)]) as session:
        assert_close(session.run(feeds), {"y": expected})
    np.savez(tmp_path / "inputs.npz", **feeds)
    asked = ("check", package, "--model", model, "--inputs", tmp_path / "inputs.npz")
    for adapters in (("--no-memory",), ("--adapter", style), ("--no-memory", "--adapter", f"{style}:-0.5")):
        assert "1 of 1 outputs agree" in splitc(*asked, *adapters).stdout
    peft = write_peft(tmp_path / "peft", pairs, lora_alpha=3 * 2)  # the model's factor of 2 is in it
    assert "1 of 1 outputs agree" in splitc(*asked, "--no-memory", "--adapter", peft).stdout


def test_quantized_layers_have_slots(tmp_path: Path) -> None:
    """The update is added to the unquantized product: A and B have the type that the weight is dequantized to."""
    b = Block(21)
    value = b.data("x", (4, WIDTH), ["n", WIDTH])
    for number in range(LAYERS):
        with b.scope(f"layers.{number}"):
            name = f"layers.{number}.up"
            weight = b.weight(f"{name}.weight", ir.tensor((b.random(name, WIDTH, WIDTH) * 100).astype(np.int8)))
            scales = b.weight(f"{name}.scale", ir.tensor(np.full(WIDTH, 0.01, np.float32)))
            value = b.op("Tanh", b.op("MatMul", value, b.op("DequantizeLinear", weight, scales, axis=1)))
    b.give(value, "y", ["n", WIDTH])
    save(b.model(), tmp_path / "model.onnx")
    pairs = random_pairs({f"layers.{n}.up": (WIDTH, WIDTH) for n in range(LAYERS)}, 2, size=0.3)
    adapter = write_peft(tmp_path / "style", pairs)
    expected = b.feeds["x"]
    for number in range(LAYERS):
        name = f"layers.{number}.up"
        first, second = pairs[name]
        weight = (b.random(name, WIDTH, WIDTH) * 100).astype(np.int8) * np.float32(0.01)
        expected = np.tanh(expected @ weight + 2 * expected @ first.T @ second.T)
    for mode in ("layer", "tensor"):
        request = Request(split_mode=mode, lora_slots=2)
        compile_model(plan_model(tmp_path / "model.onnx", "2xcpu", request), tmp_path / mode, verify=False)
        with Session(tmp_path / mode) as session:
            session.adapters.load("style", adapter)
            given = session.run(b.feeds, adapters="style")["y"]
        np.testing.assert_allclose(given, expected, rtol=0.05, atol=0.05)  # ONNX Runtime quantizes the other factor
        assert np.abs(given - expected).max() < 0.02 or mode == "tensor"


# The inputs, outputs and kernel of convolutions, and how they look.
CONVOLUTIONS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "up": ((8, 16, 3, 3), {"pads": [1, 1, 1, 1]}),
    "mix": ((16, 16, 3, 3), {"pads": [2, 2, 2, 2], "dilations": [2, 2]}),
    "down": ((16, 8, 1, 1), {}),
    "less": ((8, 8, 3, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "groups": ((8, 8, 3, 3), {"pads": [1, 1, 1, 1], "group": 4}),
}


def with_convolutions(path: Path) -> Mapping[str, Any]:
    """Blocks of convolutions with kernels, strides and dilations, with and without biases."""
    b = Block()

    def layer(value: ir.Value, name: str) -> ir.Value:
        (inputs, outputs, *kernel), how = CONVOLUTIONS[name.rpartition(".")[2]]
        weight = b.w(f"{name}.weight", outputs, inputs // how.get("group", 1), *kernel)
        biases = [] if name.endswith("less") else [b.w(f"{name}.bias", outputs)]
        return b.op("Conv", value, weight, *biases, **how)

    value = b.data("x", (2, 8, 12, 12), ["batch", 8, 12, 12])
    for number in range(2):
        with b.scope(f"layers.{number}"):
            up = b.op("Relu", layer(value, f"layers.{number}.up"))
            mixed = b.op("Add", up, b.op("Relu", layer(up, f"layers.{number}.mix")))
            value = b.op("Add", value, layer(mixed, f"layers.{number}.down"))
            value = b.op("Tanh", layer(layer(value, f"layers.{number}.groups"), f"layers.{number}.less"))
    b.give(b.op("Conv", value, b.w("head.weight", 4, 8, 1, 1)), "y", ["batch", 4, 3, 3])
    save(b.model(), path)
    return b.feeds


def test_convolutions_have_slots(tmp_path: Path) -> None:
    """If they have no groups. Outputs equal the model's with the adapter in its weights, with as many collectives."""
    feeds = dict(with_convolutions(tmp_path / "model.onnx"))
    sizes = {f"layers.{n}.{part}": sizes for n in range(2) for part, (sizes, _) in CONVOLUTIONS.items()}
    sizes = {name: shape for name, shape in sizes.items() if "groups" not in name}
    adapter = write_peft(tmp_path / "style", random_pairs(sizes, 3, size=0.2))
    expected = {}
    for name, lora in (("plain", []), ("merged", [(str(adapter), 1.0)])):
        plan = plan_model(tmp_path / "model.onnx", ["cpu0"], Request(lora=lora))
        compile_model(plan, tmp_path / name, verify=False)
        with Session(tmp_path / name) as session:
            expected[name] = session.run(feeds)
    assert np.abs(expected["merged"]["y"] - expected["plain"]["y"]).max() > 0.1
    for number, (mode, shares) in enumerate(MODES):
        package, request = tmp_path / f"{number}", Request(split_mode=mode, tensor_split=shares)
        plain = plan_model(tmp_path / "model.onnx", "2xcpu", request)
        slotted = plan_model(tmp_path / "model.onnx", "2xcpu", replace(request, lora_slots=3))
        manifest = compile_model(slotted, package, verify=False)
        assert manifest.collectives == plain.split.collectives
        known = {slot.names[0]: (slot.inputs, slot.outputs, *slot.kernel) for slot in manifest.slots}
        assert known == {**sizes, "head": (8, 4, 1, 1)}
        with Session(package) as session:
            assert session.adapters.load("style", adapter).unmatched == {}
            assert_close(session.run(feeds), expected["plain"])
            assert_close(session.run(feeds, adapters="style"), expected["merged"])


def test_slots_are_counted(decoder: Path) -> None:
    """The plan counts their memory: A and B, and a second engine. All layers have slots, the head too."""
    for device in ("cpu0", "cuda0"):
        plain, slotted = (
            plan_model(decoder, [device], Request(lora_slots=rank, memory=["1GiB"])) for rank in (None, 12)
        )
        assert len(slotted.analysis.slots) == 15
        memory, without = slotted.ranks[0].memory, plain.ranks[0].memory
        assert memory.sums == 4 * 16 * sum(slot.inputs + slot.outputs for slot in slotted.analysis.slots)
        assert memory.weights == without.weights and without.adapters == 0
        engines = slotted_bytes(slotted.ranks[0].device, "onnxruntime", 0, memory.nodes)
        rest, running = memory.adapters - memory.sums - engines, memory.activations - memory.passed
        packed = max(memory.held_weights + running, memory.loading.most)
        assert 0 < rest == (packed if device == "cpu0" else running)
        assert memory.total - without.total >= memory.adapters
    assert any("lm_head" in slot.names[0] for slot in slotted.analysis.slots)


def test_no_cut_goes_through_a_slot(tmp_path: Path) -> None:
    """Cuts carry the same values as without slots, and requests without an adapter run the graph without slots."""
    b = Block(21)
    value = b.data("x", (4, WIDTH), ["n", WIDTH])
    for number in range(LAYERS):
        with b.scope(f"layers.{number}"):
            weight = b.weight(
                f"layers.{number}.up.weight", ir.tensor(b.random(f"{number}", WIDTH, WIDTH).astype(np.float32))
            )
            value = b.op("Tanh", b.op("MatMul", value, weight))
    b.give(value, "y", ["n", WIDTH])
    save(b.model(), tmp_path / "model.onnx")
    read = []
    for slots in (None, 2):
        request = Request(split_mode="layer", lora_slots=slots)
        plan = plan_model(tmp_path / "model.onnx", f"{LAYERS}xcpu", request)
        compile_model(plan, tmp_path / f"slots{slots}", verify=False)
        read.append(read_manifest(tmp_path / f"slots{slots}"))
    plain, slotted = read
    assert slotted.slots and slotted.cuts == plain.cuts
    assert [rank.program for rank in slotted.ranks] == [rank.program for rank in plain.ranks]
    for rank in slotted.ranks:
        path = tmp_path / "slots2" / rank.engines[0].path
        assert [value.name for value in onnx.load(path).graph.input] == rank.engines[0].inputs


@pytest.mark.parametrize("inner", [WIDTH, INNER])
def test_weights_that_are_read_both_ways_have_no_slot(inner: int, tmp_path: Path) -> None:
    """The second product had the update of the first one, untransposed: a wrong answer if the matrix is square."""
    b = Block()
    x = b.data("x", (2, 5, WIDTH), ["batch", "n", WIDTH])
    weight, other = b.w("tied.weight", WIDTH, inner), b.w("other.weight", WIDTH, WIDTH)
    inside = b.op("Tanh", b.op("MatMul", b.op("MatMul", x, other), weight))
    b.give(b.op("MatMul", inside, b.op("Transpose", weight, perm=[1, 0])), "y", ["batch", "n", WIDTH])
    save(b.model(), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["cpu0"], Request(lora_slots=4))
    compile_model(plan, tmp_path / "package")
    assert [slot.names[0] for slot in read_manifest(tmp_path / "package").slots] == ["other"]
