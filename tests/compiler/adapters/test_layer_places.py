"""Slots for adapters beside dynamically quantized layers, and why other layers have none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from tests.helpers.adapters import product, random_pairs, write_peft
from tests.helpers.blocks import Block
from tests.helpers.command import splitc

WIDTH, LAYERS = 32, 3
FORMS = ["scales first", "one by one", "to float", "whole", "convolution"]


@pytest.mark.parametrize("form", FORMS)
def test_dynamically_quantized_layers_have_slots(form: str, tmp_path: Path) -> None:
    """In each form that tools write, a layer's input is the value before quantization, its output the scaled result."""
    if form == "convolution" and ort.__version__.startswith("1.23."):
        pytest.skip("ONNX Runtime 1.23 has no ConvInteger for these number types")
    b = Block(21)
    kernel = (3, 3) if form == "convolution" else ()
    value = b.data("x", (2, WIDTH, 5, 5) if kernel else (4, WIDTH), ["n", WIDTH, *([5, 5] if kernel else [])])
    scale = b.weight("scale", ir.tensor(np.float32(0.01)))
    for number in range(LAYERS):
        with b.scope(f"layers.{number}"):
            numbers = (b.random(f"{number}", WIDTH, WIDTH, *kernel) * 100).astype(np.int8)
            weight = b.weight(f"layers.{number}.up.weight_quantized", ir.tensor(numbers))
            value = b.op("Tanh", dynamically_quantized(b, form, value, weight, scale))
    b.give(value, "y", ["n", WIDTH, *([5, 5] if kernel else [])])
    save(b.model(), tmp_path / "model.onnx")
    pairs = random_pairs({f"layers.{number}.up": (WIDTH, WIDTH, *kernel) for number in range(LAYERS)}, 4, size=0.1)
    adapter = write_peft(tmp_path / "style", pairs)
    given = []
    ways: list[tuple[str, list[float] | None]] = [("layer", None)]
    if form != "whole":  # an operator without a rule for its axes
        ways += [("tensor", [5, 1])]
    for mode, shares in ways:
        package = tmp_path / f"{mode}{shares}"
        request = Request(split_mode=mode, tensor_split=shares, lora_slots=4)
        plan = plan_model(tmp_path / "model.onnx", "2xcpu", request)
        assert len(plan.analysis.slots) == LAYERS and not plan.analysis.slotless
        compile_model(plan, package, verify=False)
        with Session(package) as session:
            assert session.adapters.load("style", adapter).unmatched == {}
            given.append((session.run(b.feeds), session.run(b.feeds, adapters="style")))
    whole = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    update = written_update(tmp_path, pairs)
    for plain, adapted in given:
        np.testing.assert_allclose(plain["y"], whole.run(["y"], b.feeds)[0], atol=2e-2)
        np.testing.assert_allclose(adapted["y"], update.run(["y"], b.feeds)[0], atol=2e-2)
        assert np.abs(adapted["y"] - plain["y"]).max() > 0.1


def dynamically_quantized(b: Block, form: str, value: ir.Value, weight: ir.Value, scale: ir.Value) -> ir.Value:
    """The product of a dynamically quantized value with a quantized weight."""
    if form == "whole":
        return b.op("com.microsoft.DynamicQuantizeMatMul", value, weight, scale)
    numbers, own, zero = b.ops("DynamicQuantizeLinear", value, outputs=3)
    if form == "to float":
        return b.op("com.microsoft.MatMulIntegerToFloat", numbers, weight, own, scale, zero)
    operator, pads = ("ConvInteger", {"pads": [1, 1, 1, 1]}) if form == "convolution" else ("MatMulInteger", {})
    made = b.op("Cast", b.op(operator, numbers, weight, zero, **pads), to=int(ir.DataType.FLOAT))
    if form == "one by one":
        return b.op("Mul", b.op("Mul", own, made), scale)
    return b.op("Mul", made, b.op("Mul", own, scale))


def written_update(folder: Path, pairs: Mapping[str, Any]) -> ort.InferenceSession:
    """The model with explicit updates beside its layers: 2 B A, since alpha is twice the rank."""
    model = onnx.load(folder / "model.onnx")
    tanhs = [node for node in model.graph.node if node.op_type == "Tanh"]
    nodes: list[Any] = []
    source = "x"
    for node in model.graph.node:
        if node.op_type == "Tanh":
            number = tanhs.index(node)
            update = 2 * product(pairs[f"layers.{number}.up"])
            kernel = update.ndim > 2
            model.graph.initializer.append(onnx.numpy_helper.from_array(update if kernel else update.T, f"u{number}"))
            pads: dict[str, Any] = {"pads": [1, 1, 1, 1]} if kernel else {}
            operator = "Conv" if kernel else "MatMul"
            nodes.append(onnx.helper.make_node(operator, [source, f"u{number}"], [f"d{number}"], **pads))
            nodes.append(onnx.helper.make_node("Add", [node.input[0], f"d{number}"], [f"s{number}"]))
            node.input[0], source = f"s{number}", node.output[0]
        nodes.append(node)
    made = onnx.GraphProto()
    made.node.extend(nodes)
    del model.graph.node[:]
    model.graph.node.extend(made.node)
    onnx.save(model, folder / "update.onnx")
    return ort.InferenceSession(folder / "update.onnx", providers=["CPUExecutionProvider"])


def test_layers_without_a_slot_are_said_with_the_reason(tmp_path: Path) -> None:
    b = Block(21)
    value = b.data("x", (2, WIDTH, 5, 5), ["n", WIDTH, 5, 5])
    for number, groups in enumerate((1, 4, 4)):
        with b.scope(f"layers.{number}"):
            weight = b.w(f"layers.{number}.conv.weight", WIDTH, WIDTH // groups, 3, 3)
            value = b.op("Relu", b.op("Conv", value, weight, group=groups, pads=[1, 1, 1, 1]))
    b.give(value, "y", ["n", WIDTH, 5, 5])
    save(b.model(), tmp_path / "model.onnx")
    asked = ("plan", tmp_path / "model.onnx", "-d", "cpu0", "--lora-slots", 4)
    shown = splitc(*asked).stdout
    assert "1 layers take adapters" in shown and "2 not: its convolution has 4 groups" in shown
    assert "layers.2.conv.weight" in splitc(*asked, "--explain").stdout
