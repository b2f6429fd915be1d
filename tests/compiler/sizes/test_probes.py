"""Probe sizes, which tell axes apart: they differ, and are large enough for models that shrink their inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from models.writer import save
from splitc.compiler.inference.shapes import BoundShapes, bind_shapes, infer_shapes
from splitc.compiler.request.shapes import Shape
from splitc.compiler.sizes import probes
from splitc.compiler.sizes.probes import Probes
from tests.helpers.blocks import Block
from tests.helpers.graphs import read_graph

POOL = {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}


def test_only_what_is_made_small_has_many_elements(tmp_path: Path) -> None:
    """Masks with as many tokens as a sound has samples would be too large to compute."""
    b = Block()
    frames = b.op("Conv", b.data("sound", (2, 1, 4800), ["batch", 1, "samples"]), b.w("A", 4, 1, 60), strides=[60])
    tokens = b.data("x", (2, 3, 4), ["batch", "tokens", 4])
    b.give(b.op("MatMul", tokens, b.op("Conv", frames, b.w("B", 4, 4, 5), strides=[5])))
    save(b.model(), tmp_path / "model.onnx")
    graph = read_graph(tmp_path / "model.onnx")
    infer_shapes(graph.model)
    planned = {name: feed.shape for name, feed in b.feeds.items()}
    shapes = Probes(graph, planned, bind_shapes(graph.model, planned)).distinct().shapes
    batch, count, left = shapes["y"]
    assert shapes["sound"][2] > 1000 > 20 > max(batch, count)
    assert min(batch, count) > 1 < left


def test_sound_that_becomes_few_tokens_has_more_than_one(tmp_path: Path) -> None:
    """As in Moonshine: with one token, which is that of position 0, a table of angles would prove nothing."""
    b = Block()
    made = b.data("sound", (2, 1, 4800), ["batch", 1, "samples"])
    for name, shape, stride in (("A", (4, 1, 127), 64), ("B", (4, 4, 7), 3), ("C", (4, 4, 3), 2)):
        made = b.op("Conv", made, b.w(name, *shape), strides=[stride])
    b.give(made)
    save(b.model(), tmp_path / "model.onnx")
    graph = read_graph(tmp_path / "model.onnx")
    infer_shapes(graph.model)
    planned = {name: feed.shape for name, feed in b.feeds.items()}
    shapes = Probes(graph, planned, bind_shapes(graph.model, planned)).distinct().shapes
    assert shapes["y"][2] > 1


def test_sizes_that_are_few_are_not_the_same_by_chance(tmp_path: Path) -> None:
    """As for tokens of a short sound, if inference loses the sizes that depend on its samples."""
    b = Block()
    sound = b.data("sound", (1, 7), ["batch", "samples"])
    shape = b.op("Shape", sound)
    known = b.op("Where", b.op("Equal", shape, b.ints(-1)), b.ints(1), shape)
    tokens = b.op("Slice", b.op("Reshape", sound, known), *(b.ints(n) for n in (0, 1 << 40, 1, 8)))
    b.give(tokens)
    save(b.model(), tmp_path / "model.onnx")
    graph = read_graph(tmp_path / "model.onnx")
    infer_shapes(graph.model)
    planned = {name: feed.shape for name, feed in b.feeds.items()}
    bound = bind_shapes(graph.model, planned)
    assert bound.shapes["y"] == (1, 1)
    assert 1 not in Probes(graph, planned, bound).different().shapes["y"]


def test_shapes_are_inferred_once_for_the_same_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some ways lead to the same sizes. If few fit, as 8 and more above a multiple of 12, all are tried."""
    b = Block()
    x = b.data("x", (2, 8, 3), ["batch", "length", 3])
    windows = b.op("Concat", b.shape(x, 0), b.op("Div", b.shape(x, 1), b.ints(4)), b.ints(12), axis=0)
    b.give(b.op("Reshape", x, windows))
    left = b.op("Concat", b.op("Mod", b.shape(x, 1), b.ints(3)), b.ints(6), axis=0)
    b.give(b.op("Reshape", b.w("A", 12), left), "z")
    save(b.model(), tmp_path / "model.onnx")
    graph = read_graph(tmp_path / "model.onnx")
    infer_shapes(graph.model)
    planned = {name: feed.shape for name, feed in b.feeds.items()}
    bound, tried = bind_shapes(graph.model, planned), list[Mapping[str, Shape]]()

    def note(model: ir.Model, shapes: Mapping[str, Shape]) -> BoundShapes:
        tried.append(shapes)
        return bind_shapes(model, shapes)

    monkeypatch.setattr(probes, "bind_shapes", note)
    batch, length, _ = Probes(graph, planned, bound).different().shapes["x"]
    assert batch != 2 and length != 8 and length % 4 == 0
    assert len(tried) == len({shapes["x"] for shapes in tried}) > 3


def test_what_is_reshaped_keeps_its_elements(tmp_path: Path) -> None:
    """With prime sides, padding to whole windows adds elements that a model for whole windows can't reshape."""
    b = Block()
    x = b.data("x", (2, 4, 6), ["batch", "height", "width"])
    missing = [b.op("Mod", b.shape(x, axis), b.ints(2)) for axis in (1, 2)]
    filled = b.op("Pad", x, b.op("Concat", b.ints(0, 0, 0, 0), *missing, axis=0))
    places = b.op("Mul", b.shape(x, 1), b.shape(x, 2))
    b.give(b.op("Reshape", filled, b.op("Concat", b.shape(x, 0), places, axis=0)))
    save(b.model(), tmp_path / "model.onnx")
    graph = read_graph(tmp_path / "model.onnx")
    infer_shapes(graph.model)
    planned = {name: feed.shape for name, feed in b.feeds.items()}
    _, height, width = Probes(graph, planned, bind_shapes(graph.model, planned)).different().shapes["x"]
    assert height % 2 == width % 2 == 0 and height not in (4, width) and width != 6


def test_patches_in_windows_between_borders(tmp_path: Path) -> None:
    """As in Qwen2.5-VL: four patches for each number of the order, and one border more than windows."""
    b = Block()
    patches, order = b.data("x", (24, 8), ["n", 8]), b.indices("order", np.arange(6), ["m"])
    groups = b.op("Reshape", patches, b.op("Concat", b.shape(order, 0), b.ints(4, -1), axis=0))
    rows = b.op("Gather", b.op("MatMul", groups, b.w("A", 8, 8)), order)
    windows = b.op("Sub", b.shape(b.indices("borders", (0, 8, 16, 24), ["k"]), 0), b.ints(1))
    apart = b.op("Concat", windows, b.ints(-1, 8), axis=0)
    b.give(b.op("Reshape", b.op("Reshape", rows, apart), b.ints(-1, 8)), "y", ["n", 8])
    save(b.model(), tmp_path / "model.onnx")
    graph = read_graph(tmp_path / "model.onnx")
    infer_shapes(graph.model)
    planned = {name: feed.shape for name, feed in b.feeds.items()}
    shapes = Probes(graph, planned, bind_shapes(graph.model, planned)).different().shapes
    assert [shapes[name] for name in ("x", "order", "borders", "y")] == [(72, 8), (18,), (10,), (72, 8)]


def test_length_that_the_model_has_as_a_number_is_kept(tmp_path: Path) -> None:
    """As in the keys of PyTorch's attention in TorchScript's export."""
    b = Block()
    x = b.data("x", (2, 6, 4), ["batch", "tokens", 4])
    b.give(b.op("Reshape", x, b.op("Concat", b.shape(x, 0), b.ints(6, 2, 2), axis=0)))
    save(b.model(), tmp_path / "model.onnx")
    graph = read_graph(tmp_path / "model.onnx")
    infer_shapes(graph.model)
    planned = {name: feed.shape for name, feed in b.feeds.items()}
    batch, tokens, *_ = Probes(graph, planned, bind_shapes(graph.model, planned)).distinct().shapes["x"]
    assert batch > 2 and tokens == 6


def test_attention_has_as_many_keys_as_values(tmp_path: Path) -> None:
    """Although torch's newer exporter names the length of each cache anew."""
    b = Block(opset=23)
    sizes = (2, 3, 5, 4)
    queries = b.data("q", (2, 3, 7, 4), ["batch", 3, "new", 4])
    keys, values = (b.data(name, sizes, ["batch", 3, f"{name}_rows", 4]) for name in "kv")
    b.give(b.op("Attention", queries, keys, values))
    save(b.model(), tmp_path / "model.onnx")
    graph = read_graph(tmp_path / "model.onnx")
    infer_shapes(graph.model)
    planned = {name: feed.shape for name, feed in b.feeds.items()}
    shapes = Probes(graph, planned, bind_shapes(graph.model, planned)).distinct().shapes
    assert shapes["k"] == shapes["v"] and shapes["k"][2] != shapes["q"][2]


def test_a_length_of_a_mask_and_of_caches(tmp_path: Path) -> None:
    """Torch's exporter names the length of encoder states by the mask, and in other caches anew."""
    b = Block()
    mask = b.data("mask", (2, 9), ["batch", "states"])
    queries = b.data("q", (2, 3, 1, 4), ["batch", 3, 1, 4])
    keys = b.data("k", (2, 3, 9, 4), ["batch", 3, "states", 4])
    values = b.data("v", (2, 3, 9, 4), ["batch", 3, "others", 4])
    scores = b.op("MatMul", queries, b.op("Transpose", keys, perm=[0, 1, 3, 2]))
    weights = b.op("Softmax", b.op("Add", scores, b.op("Unsqueeze", mask, b.ints(1, 2))))
    b.give(b.op("MatMul", weights, values))
    shapes = probes_of(b, tmp_path).different().shapes
    assert shapes["k"] == shapes["v"] and shapes["k"][2] == shapes["mask"][1] != 9


def test_symbol_that_is_another_number_may_be_any(tmp_path: Path) -> None:
    """Whatever its name, values computed from it differ between requests."""
    b = Block()
    b.give(b.op("Tanh", b.data("x", (2, 7, 4), ["0", "1", "4"])))
    save(b.model(), tmp_path / "model.onnx")
    graph = read_graph(tmp_path / "model.onnx")
    infer_shapes(graph.model)
    planned = {name: feed.shape for name, feed in b.feeds.items()}
    batch, length, width = Probes(graph, planned, bind_shapes(graph.model, planned)).different().shapes["y"]
    assert batch != 2 and length != 7 and width == 4


def test_output_that_is_named_by_a_symbol_that_it_is_not(tmp_path: Path) -> None:
    """As if an exporter was told that the first axis of each output is the batch."""
    b = Block()
    x = b.data("x", (1, 5), ["batch", "tokens"])
    shape = b.op("Shape", x)
    known = b.op("Where", b.op("Equal", shape, b.ints(-1)), b.ints(1), shape)
    places = b.op("Slice", b.w("places", 1, 8), b.ints(0), b.shape(x, 1), b.ints(1))
    kinds = b.op("Unsqueeze", b.op("Add", x, b.op("Expand", places, known)), b.ints(0))
    b.give(b.op("Concat", kinds, kinds, axis=0), shape=["batch", "of", "tokens"])
    save(b.model(), tmp_path / "model.onnx")
    graph = read_graph(tmp_path / "model.onnx")
    infer_shapes(graph.model)
    planned = {name: feed.shape for name, feed in b.feeds.items()}
    bound = bind_shapes(graph.model, planned)
    kinds_of, batch, tokens = Probes(graph, planned, bound).different().shapes["y"]
    assert kinds_of == 2 and batch != 1 and tokens != 5


def probes_of(b: Block, folder: Path) -> Probes:
    save(b.model(), folder / "model.onnx")
    graph = read_graph(folder / "model.onnx")
    infer_shapes(graph.model)
    planned = {name: feed.shape for name, feed in b.feeds.items()}
    return Probes(graph, planned, bind_shapes(graph.model, planned))


def test_small_sizes_of_a_decoder_that_names_each_cache_anew(tmp_path: Path) -> None:
    """As torch's exporter does: a prime for each would leave large ones for the rows and tokens."""
    b = Block()
    x = b.data("x", (1, 6, 8), ["batch", "tokens", 8])
    mask = b.op("ReduceSum", b.data("mask", (1, 6), ["rows", "all"]), b.ints(1))
    hidden = b.op("Add", x, b.op("Unsqueeze", mask, b.ints(2)))
    for number in range(30):
        past = b.data(f"past{number}", (1, 2, 0, 8), ["batch", 2, f"rows{number}", 8])
        rows = b.op("ReduceSum", past, b.ints(1), keepdims=0)
        hidden = b.op("Add", hidden, b.op("ReduceSum", rows, b.ints(1)))
    b.give(hidden)
    several, one = (bound.shapes for bound in probes_of(b, tmp_path).small())
    assert several["x"] == (5, 7, 8) and several["mask"] == (5, 10)  # the past and the new tokens
    assert several["past0"] == several["past29"] == (5, 2, 3, 8)
    assert one["x"] == (1, 7, 8)


def test_small_sizes_of_an_image_that_is_made_smaller_and_larger_again(tmp_path: Path) -> None:
    b = Block()
    x = b.data("x", (2, 4, 64, 64), ["batch", 4, "height", "width"])
    half = b.op("AveragePool", b.op("AveragePool", x, **POOL), **POOL)
    scale = b.constant([1.0, 1.0, 4.0, 4.0], np.float32)
    b.give(b.op("Concat", b.op("Resize", half, None, scale, mode="nearest"), x, axis=1), shape=["?"] * 4)
    first, *_ = probes_of(b, tmp_path).small()
    assert first.shapes["x"] == (3, 4, 5 * 4, 7 * 4)


def test_small_sizes_of_lengths_that_are_one_by_their_sizes_alone(tmp_path: Path) -> None:
    b = Block()
    tokens, places = b.data("x", (1, 40, 8), [1, "tokens", 8]), b.data("places", (40, 3), ["places", 3])
    b.give(b.op("Concat", tokens, b.op("Unsqueeze", places, b.ints(0)), axis=2))
    first, *_ = probes_of(b, tmp_path).small()
    assert first.shapes["x"] == (1, 3, 8) and first.shapes["places"] == (3, 3)


def test_a_shape_that_only_the_probes_know(tmp_path: Path) -> None:
    """As where more tokens are planned than the model's tables have."""
    b = Block()
    b.give(b.op("Unsqueeze", b.data("x", (1, 100), ["batch", "tokens"]), b.ints(0)))
    save(b.model(), tmp_path / "model.onnx")
    graph = read_graph(tmp_path / "model.onnx")
    infer_shapes(graph.model)
    for value in graph.graph.outputs:
        value.shape = None
    planned = {name: feed.shape for name, feed in b.feeds.items()}
    bound = bind_shapes(graph.model, planned)
    bound = replace(bound, shapes={"x": bound.shapes["x"]})
    assert Probes(graph, planned, bound).distinct().shapes["y"][0] == 1


def probes_of_a_decoder(tmp_path: Path, rows: int, new: int, past: int) -> Probes:
    """With a mask for all tokens, whose number has a symbol of its own."""
    b = Block()
    x, cache = b.data("x", (rows, new, 4), ["rows", "new", 4]), b.data("past", (rows, past, 4), ["rows", "past", 4])
    mask = b.data("mask", (rows, past + new, 1), ["rows", "all", 1])
    b.give(b.op("Add", b.op("Concat", cache, x, axis=1), mask), shape=["rows", "all", 4])
    save(b.model(), tmp_path / "model.onnx")
    graph = read_graph(tmp_path / "model.onnx")
    infer_shapes(graph.model)
    planned = {name: feed.shape for name, feed in b.feeds.items()}
    return Probes(graph, planned, bind_shapes(graph.model, planned))


@pytest.mark.parametrize("given", [(1, 1, 4), (4, 1, 4), (1, 1, 1)])
def test_a_length_is_the_sum_of_those_with_which_shapes_agree(tmp_path: Path, given: tuple[int, int, int]) -> None:
    """A mask of 5 is as long as 4 earlier tokens and a new one, and not as they and a row."""
    shapes = probes_of_a_decoder(tmp_path, *given).distinct().shapes
    assert shapes["mask"][1] == shapes["past"][1] + shapes["x"][1]
    assert len({*shapes["x"][:2], shapes["past"][1]}) == 3


def test_a_token_after_none_is_told_from_its_row(tmp_path: Path) -> None:
    """A mask of 1 is as long as the token, whose length is the sum of a row and an empty past too."""
    shapes = probes_of_a_decoder(tmp_path, 1, 1, 0).different().shapes
    assert shapes["mask"][1] == shapes["past"][1] + shapes["x"][1]
    assert len({1, *shapes["x"][:2]}) == 3


def test_empty_caches_of_transposed_keys_grow_with_those_of_values(tmp_path: Path) -> None:
    """The same axis is not enough: the rows of one are along its last axis, those of the other along the third."""
    b = Block()
    queries = b.data("q", (1, 3, 7, 4), ["batch", 3, "new", 4])
    keys = b.data("k", (1, 3, 4, 0), ["batch", 3, 4, "key_rows"])
    values = b.data("v", (1, 3, 0, 4), ["batch", 3, "value_rows", 4])
    b.give(b.op("MatMul", b.op("MatMul", queries, keys), values))
    save(b.model(), tmp_path / "model.onnx")
    graph = read_graph(tmp_path / "model.onnx")
    infer_shapes(graph.model)
    planned = {name: feed.shape for name, feed in b.feeds.items()}
    shapes = Probes(graph, planned, bind_shapes(graph.model, planned)).different().shapes
    assert shapes["k"][3] == shapes["v"][2] > 0
    batch, _, new, _ = shapes["q"]
    assert len({batch, new, shapes["v"][2]}) == 3 and batch != 1 and new != 7
