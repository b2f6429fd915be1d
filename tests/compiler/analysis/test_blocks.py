"""Blocks from structure: models whose blocks are known, written in ways that exporters write them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from models.llama import Size, build
from models.minilm import Encoder
from models.writer import Writer, save
from splitc.compiler.analysis.facts import Analysis, analyze
from splitc.compiler.execution.liveness import crossing_values, total_bytes
from splitc.compiler.request.shapes import AskedShapes

MakeModel = Callable[[ir.Model], Path]
CONFIG: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 5, "layer_norm_eps": 1e-12}


@pytest.fixture
def write(tmp_path: Path) -> MakeModel:
    def write(model: ir.Model) -> Path:
        save(model, tmp_path / "model.onnx")
        return tmp_path / "model.onnx"

    return write


def kinds(analysis: Analysis) -> list[str]:
    return [block.kind for block in analysis.partition.blocks]


def encoder_weights() -> dict[str, np.ndarray]:
    """Random weights for a BERT of CONFIG's size."""
    generator = np.random.default_rng(0)
    hidden, inner = 32, 64
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (50, hidden),
        "embeddings.position_embeddings.weight": (40, hidden),
        "embeddings.token_type_embeddings.weight": (2, hidden),
        "embeddings.LayerNorm.weight": (hidden,),
        "embeddings.LayerNorm.bias": (hidden,),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        name = f"encoder.layer.{layer}"
        parts = {
            "attention.self.query": hidden,
            "attention.self.key": hidden,
            "attention.self.value": hidden,
            "attention.output.dense": hidden,
        }
        for part, width in parts.items():
            shapes |= {f"{name}.{part}.weight": (width, hidden), f"{name}.{part}.bias": (width,)}
        shapes |= {f"{name}.intermediate.dense.weight": (inner, hidden), f"{name}.intermediate.dense.bias": (inner,)}
        shapes |= {f"{name}.output.dense.weight": (hidden, inner), f"{name}.output.dense.bias": (hidden,)}
        for part in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes |= {f"{name}.{part}.weight": (hidden,), f"{name}.{part}.bias": (hidden,)}
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def strip(model: ir.Model) -> None:
    """Take away all names that say something, as tools without names write them."""
    for number, node in enumerate(model.graph):
        node.name = ""
        for value in node.outputs:
            if not value.is_graph_output():
                value.name = f"v{number}"
    for number, value in enumerate(list(model.graph.initializers.values())):
        value.name = f"w{number}"


def shuffle(model: ir.Model) -> None:
    """Another topological order, as random as can be."""
    chance = random.Random(3)
    nodes = list(model.graph)
    model.graph.remove(nodes)
    done: set[ir.Node] = set()
    while nodes:
        ready = [n for n in nodes if all(v is None or v.producer() is None or v.producer() in done for v in n.inputs)]
        node = chance.choice(ready)
        model.graph.append(node)
        done.add(node)
        nodes.remove(node)


@pytest.mark.parametrize("change", [lambda _: None, strip, shuffle], ids=["named", "nameless", "shuffled"])
def test_decoder_has_its_layers(write: MakeModel, change: Callable[[ir.Model], None]) -> None:
    model = build(Size(layers=6, hidden=64, heads=4, kv_heads=2, feed_forward=160, vocabulary=96))
    change(model)
    analysis = analyze(write(model), AskedShapes(), 1)
    assert kinds(analysis) == ["prologue", *["block"] * 6, "epilogue"]
    weights = [analysis.costs.weight_bytes(block.nodes) for block in analysis.partition.blocks[1:-1]]
    # The last one may have taken the final norm along, and its two constants.
    assert max(weights) - min(weights) <= 4 * (64 + 2)


def test_blocks_are_called_what_the_exporter_called_them(decoder: Path) -> None:
    names = [block.name for block in analyze(decoder, AskedShapes(), 1).partition.blocks]
    assert names == ["prologue", "layers.0", "layers.1", "epilogue"]


@pytest.mark.parametrize("change", [lambda _: None, strip], ids=["named", "nameless"])
def test_encoder_has_its_layers(write: MakeModel, change: Callable[[ir.Model], None]) -> None:
    model = Encoder(CONFIG, encoder_weights()).build()
    change(model)
    blocks = analyze(write(model), AskedShapes(), 1).partition.blocks
    assert sum(block.kind == "block" for block in blocks) == 5


def test_mixture_of_experts_has_its_layers(write: MakeModel) -> None:
    model = build(Size(layers=3, hidden=64, heads=4, kv_heads=2, feed_forward=96, vocabulary=96, experts=4))
    assert kinds(analyze(write(model), AskedShapes(), 1)) == ["prologue", *["block"] * 3, "epilogue"]


def test_large_model_is_not_judged_by_the_share_of_one_weight(write: MakeModel) -> None:
    model = build(Size(layers=24, hidden=32, heads=4, kv_heads=1, feed_forward=96, vocabulary=64))
    analysis = analyze(write(model), AskedShapes(), 1)
    assert sum(kind == "block" for kind in kinds(analysis)) == 24


def test_masks_and_rotary_tables_are_rematerializable_and_weights_are_not(decoder: Path) -> None:
    analysis = analyze(decoder, AskedShapes(), 1)
    repeated = {node.op_type for node in analysis.partition.rematerializable}
    assert {"Cos", "Sin", "LessOrEqual", "Where", "Range"} <= repeated
    assert not {"MatMul", "Softmax"} & repeated
    main_path = [node for block in analysis.partition.blocks for node in block.nodes]
    assert {*main_path} | analysis.partition.rematerializable == {*analysis.graph.nodes}
    assert not {*main_path} & analysis.partition.rematerializable


def test_random_numbers_are_not_made_twice(tmp_path: Path) -> None:
    w = Writer()
    x = w.input("x", ir.DataType.FLOAT, [2, 64])
    noise = w.op("RandomNormalLike", x)
    y = w.op("MatMul", w.op("Add", x, noise), w.weight("a", ir.tensor(np.ones((64, 64), np.float32))))
    y = w.op("MatMul", w.op("Add", y, noise), w.weight("b", ir.tensor(np.ones((64, 64), np.float32))))
    w.output(y, "y", ir.DataType.FLOAT, [2, 64])
    save(w.model(), tmp_path / "model.onnx")
    assert not analyze(tmp_path / "model.onnx", AskedShapes(), 2).partition.rematerializable


def test_chain_without_repetition_is_cut_between_its_heavy_nodes(tmp_path: Path) -> None:
    """Each node of another kind or size: every gap bounds a block, at the narrowest place."""
    w = Writer()
    value = w.input("x", ir.DataType.FLOAT, ["n", 32])
    sizes = [32, 96, 48, 80, 16]
    for number, (before, after) in enumerate(itertools.pairwise(sizes)):
        value = w.op("MatMul", value, w.weight(f"w{number}", ir.tensor(np.ones((before, after), np.float32))))
        for kind in ("Relu", "Tanh", "Sigmoid", "Erf")[: number + 1]:
            value = w.op(kind, value)
    w.output(value, "y", ir.DataType.FLOAT, ["n", 16])
    save(w.model(), tmp_path / "model.onnx")
    analysis = analyze(tmp_path / "model.onnx", AskedShapes(), 4)
    assert len(analysis.partition.blocks) == 4
    assert [block.nodes[0].op_type for block in analysis.partition.blocks] == ["MatMul"] * 4


def test_more_pieces_than_layers_are_found_when_wanted(decoder: Path) -> None:
    assert len(analyze(decoder, AskedShapes(), 12).partition.blocks) >= 12


def test_total_of_live_bytes(write: MakeModel) -> None:
    """The order of the main path is chosen by this sum."""
    analysis = analyze(write(build(Size(layers=2))), AskedShapes(), 1)
    nodes, reads, size = analysis.graph.nodes, analysis.graph.reads.__getitem__, analysis.costs.value_bytes
    total = total_bytes(nodes, reads, size)
    assert total == sum(size(value) for values in crossing_values(nodes, reads) for value in values)
    assert total > 0
