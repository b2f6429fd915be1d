"""Roles of inputs are detected in the graph, whatever their names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from models.llama import Size
from models.llama_fused import build as build_fused
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.inference.shapes import infer_shapes
from splitc.compiler.sizes.made_up import choose_fill
from splitc.compiler.sizes.roles import find_roles
from splitc.runtime import Session
from splitc.runtime.generate.feeder import Feeder
from splitc.runtime.generate.signature import find_signature
from splitc.runtime.package.manifest import Fill, Role
from splitc.runtime.package.manifest_file import read_manifest
from tests.helpers.blocks import FLOAT, INT, Block
from tests.helpers.graphs import read_graph

HEADS, HEAD, HIDDEN, VOCABULARY = 2, 8, 16, 40
SMALL = Size(layers=2, hidden=64, heads=4, kv_heads=2, feed_forward=160, vocabulary=96)


class Attention(Block):
    """A layer of attention over tokens; all inputs have names that say nothing."""

    def tokens(self, name: str = "a", rows: int = VOCABULARY) -> ir.Value:
        return self.op("Gather", self.w("words", rows, HIDDEN), self.input(name, INT, ["b", "t"]))

    def heads(self, x: ir.Value, name: str) -> ir.Value:
        product = self.op("MatMul", x, self.w(name, HIDDEN, HIDDEN))
        return self.op("Transpose", self.op("Reshape", product, self.ints(0, 0, HEADS, HEAD)), perm=[0, 2, 1, 3])

    def scores(self, query: ir.Value, key: ir.Value) -> ir.Value:
        product = self.op("MatMul", query, self.op("Transpose", key, perm=[0, 1, 3, 2]))
        return self.op("Div", product, self.constant(HEAD**0.5, np.float32))

    def attend(self, scores: ir.Value, value: ir.Value) -> None:
        attended = self.op("MatMul", self.op("Softmax", scores, axis=-1), value)
        joined = self.op("Reshape", self.op("Transpose", attended, perm=[0, 2, 1, 3]), self.ints(0, 0, HIDDEN))
        self.give(self.op("MatMul", joined, self.w("head", HIDDEN, VOCABULARY)), shape=["b", "t", VOCABULARY])

    def whole(self, x: ir.Value) -> None:
        self.attend(self.scores(self.heads(x, "q"), self.heads(x, "k")), self.heads(x, "v"))


def roles_of(block: Block, folder: Path) -> dict[str, Role]:
    save(block.model(), folder / "model.onnx")
    return roles_in(folder / "model.onnx")


def roles_in(model: Path) -> dict[str, Role]:
    graph = read_graph(model)
    infer_shapes(graph.model)
    return {value.name or "": role for value, role in find_roles(graph).items()}


def test_tokens_and_positions_of_a_table(tmp_path: Path) -> None:
    block = Attention()
    places = block.op("Gather", block.w("places", 64, HIDDEN), block.input("c", INT, ["b", "t"]))
    kinds = block.op("Gather", block.w("kinds", 2, HIDDEN), block.input("d", INT, ["b", "t"]))
    block.whole(block.op("Add", block.op("Add", block.tokens(), places), kinds))
    # The vocabulary is what the model gives numbers for, though the table of positions is larger.
    assert roles_of(block, tmp_path) == {
        "a": Role("indices", VOCABULARY),
        "c": Role("positions", 64),
        "d": Role("indices", 2),
    }


def test_positions_become_angles(tmp_path: Path) -> None:
    block = Attention()
    place = block.op("Unsqueeze", block.op("Cast", block.input("p", INT, ["b", "t"]), to=FLOAT), block.ints(2))
    cosine = block.op("Unsqueeze", block.op("Cos", block.op("Mul", place, block.w("turns", 1, HEAD))), block.ints(1))
    x = block.tokens()
    query, key = (block.op("Mul", block.heads(x, name), cosine) for name in "qk")
    block.attend(block.scores(query, key), block.heads(x, "v"))
    assert roles_of(block, tmp_path) == {"a": Role("indices", VOCABULARY), "p": Role("positions")}


def test_positions_pick_from_a_rotary_table(tmp_path: Path) -> None:
    block = Attention()
    place = block.input("p", INT, ["b", "t"])
    x = block.tokens()
    cosine = block.op("Unsqueeze", block.op("Gather", block.w("cosines", 64, HEAD), place), block.ints(1))
    query, key = (block.op("Mul", block.heads(x, name), cosine) for name in "qk")
    block.attend(block.scores(query, key), block.heads(x, "v"))
    assert roles_of(block, tmp_path) == {"a": Role("indices", VOCABULARY), "p": Role("positions", 64)}


@pytest.mark.parametrize("dtype", [INT, FLOAT])
def test_mask_is_what_scores_are_masked_by(dtype: ir.DataType, tmp_path: Path) -> None:
    block = Attention()
    kept = block.op("Cast", block.input("m", dtype, ["b", "t"]), to=FLOAT)
    away = block.op("Mul", block.op("Sub", block.constant(1.0, np.float32), kept), block.constant(-1e4, np.float32))
    x = block.tokens()
    masked = block.op(
        "Add", block.scores(block.heads(x, "q"), block.heads(x, "k")), block.op("Unsqueeze", away, block.ints(1, 2))
    )
    block.attend(masked, block.heads(x, "v"))
    assert roles_of(block, tmp_path) == {"a": Role("indices", VOCABULARY), "m": Role("mask")}


def test_input_that_a_where_chooses_by_is_a_mask(tmp_path: Path) -> None:
    block = Attention()
    kept = block.op("Unsqueeze", block.input("m", ir.DataType.BOOL, ["b", "t"]), block.ints(1, 2))
    x = block.tokens()
    scores = block.scores(block.heads(x, "q"), block.heads(x, "k"))
    block.attend(block.op("Where", kept, scores, block.constant(-1e4, np.float32)), block.heads(x, "v"))
    assert roles_of(block, tmp_path)["m"] == Role("mask")


@pytest.mark.parametrize("form", ["hides", "hides too", "shows", "is added", "hides what it shows"])
def test_mask_that_is_true_for_what_it_hides_is_padding(form: str, tmp_path: Path) -> None:
    """As key_padding_mask of torch's layers. With ones for it, every number would be NaN."""
    block = Attention()
    mask = block.input("m", ir.DataType.BOOL, ["b", "t"])
    row = block.op("Unsqueeze", mask, block.ints(1, 2))
    x = block.tokens()
    scores = block.scores(block.heads(x, "q"), block.heads(x, "k"))
    low, zero = block.constant(-np.inf, np.float32), block.constant(0.0, np.float32)
    if form == "hides":
        masked = block.op("Where", row, low, scores)
    elif form == "hides too":
        masked = block.op("Where", block.op("Or", row, block.input("later", ir.DataType.BOOL, ["t", "t"])), low, scores)
    elif form == "hides what it shows":
        masked = block.op("Where", block.op("Not", row), scores, low)
    elif form == "shows":
        masked = block.op("Where", block.op("Not", row), low, scores)
    else:
        masked = block.op("Add", scores, block.op("Where", row, low, zero))
    block.attend(masked, block.heads(x, "v"))
    assert roles_of(block, tmp_path)["m"] == Role("mask" if form == "shows" else "padding")


def test_generation_hides_no_token_by_padding(tmp_path: Path) -> None:
    block = Attention()
    row = block.op("Unsqueeze", block.input("m", ir.DataType.BOOL, ["b", "t"]), block.ints(1, 2))
    x = block.tokens()
    scores = block.scores(block.heads(x, "q"), block.heads(x, "k"))
    block.attend(block.op("Where", row, block.constant(-np.inf, np.float32), scores), block.heads(x, "v"))
    save(block.model(), tmp_path / "model.onnx")
    compile_model(plan_model(tmp_path / "model.onnx", ["cpu0"]), tmp_path / "package")
    manifest = read_manifest(tmp_path / "package")
    assert [tensor.fill for tensor in manifest.inputs if tensor.name == "m"] == [Fill("zeros")]
    feeds = Feeder(manifest, find_signature(manifest)).feeds([3, 4], 2)
    assert not feeds["m"].any() and feeds["m"].dtype == bool


def test_what_is_added_as_it_is_fed_is_a_bias(tmp_path: Path) -> None:
    block = Attention()
    x = block.tokens()
    scores = block.scores(block.heads(x, "q"), block.heads(x, "k"))
    block.attend(block.op("Add", scores, block.input("mask", FLOAT, ["b", HEADS, "t", "t"])), block.heads(x, "v"))
    assert roles_of(block, tmp_path)["mask"] == Role("bias")


def test_bias_whose_rows_are_picked_is_still_one(tmp_path: Path) -> None:
    """As of caches in place, whose queries may be read again."""
    block = Attention()
    x = block.tokens()
    scores = block.scores(block.heads(x, "q"), block.heads(x, "k"))
    rows = block.op("Gather", block.input("m", FLOAT, ["b", 1, "t", "t"]), block.input("g", INT, ["t"]), axis=2)
    block.attend(block.op("Add", scores, rows), block.heads(x, "v"))
    assert roles_of(block, tmp_path)["m"] == Role("bias")


@pytest.mark.parametrize("counts_all", [False, True])
def test_number_of_all_tokens_is_no_position(counts_all: bool, tmp_path: Path) -> None:
    """Positions are what is left of it without the new tokens, so generation must not feed a position."""
    block = Attention()
    number = block.input("p", INT, [])
    place = block.op("Sub", number, block.constant(1, np.int64)) if counts_all else number
    cosine = block.op("Cos", block.op("Mul", block.op("Cast", place, to=FLOAT), block.w("turns", HEAD)))
    x = block.tokens()
    query, key = (block.op("Mul", block.heads(x, name), cosine) for name in "qk")
    block.attend(block.scores(query, key), block.heads(x, "v"))
    assert roles_of(block, tmp_path).get("p") == (None if counts_all else Role("positions"))


def test_data_has_no_role_and_a_name_is_the_last_resort(tmp_path: Path) -> None:
    block = Attention()
    x = block.op("Add", block.tokens(), block.input("other", FLOAT, ["b", "t", HIDDEN]))
    kept = block.op("Unsqueeze", block.input("padding_mask", FLOAT, ["b", "t"]), block.ints(2))
    block.whole(block.op("Mul", x, kept))
    assert roles_of(block, tmp_path) == {"a": Role("indices", VOCABULARY), "padding_mask": Role("mask")}


def test_roles_of_a_fused_decoder(tmp_path: Path) -> None:
    save(build_fused(SMALL), tmp_path / "model.onnx")
    roles = roles_in(tmp_path / "model.onnx")
    assert roles["input_ids"].kind == "indices"
    assert roles["attention_mask"] == Role("mask", counted=True)
    assert not any(name.startswith("past") for name in roles)


def test_what_picks_computed_rows_is_below_their_planned_number(tmp_path: Path) -> None:
    """The ends of a graph's edges: they index rows of its nodes, and sums are written to them."""
    b = Block()
    nodes = b.op("MatMul", b.input("nodes", FLOAT, ["n", 4]), b.w("w", 4, 4))
    ends, picked = b.input("ends", INT, ["e", 4]), b.input("picked", INT, ["p"])
    first = b.op("Slice", ends, b.ints(0), b.ints(1), b.ints(1))
    sent = b.op("Gather", nodes, b.op("Squeeze", first, b.ints(1)))
    summed = b.op("ScatterElements", nodes, ends, sent, axis=0, reduction="add")
    b.give(b.op("Gather", summed, picked), shape=["p", 4])
    save(b.model(), tmp_path / "model.onnx")
    shapes = {"nodes": (5, 4), "ends": (9, 4), "picked": (2,)}
    compile_model(plan_model(tmp_path / "model.onnx", "cpu0", Request(shapes=shapes)), tmp_path / "package")
    inputs = {tensor.name: tensor for tensor in read_manifest(tmp_path / "package").inputs}
    assert [inputs[name].role for name in ("ends", "picked")] == [Role("positions"), None]
    assert [inputs[name].fill for name in ("ends", "picked")] == [Fill("arange", high=5), Fill("randint", high=5)]


def test_fills_follow_from_roles() -> None:
    number, whole = ir.Value(name="x", type=ir.TensorType(FLOAT)), ir.Value(name="n", type=ir.TensorType(INT))
    assert choose_fill(whole, Role("indices", 7)) == Fill("randint", high=7)
    assert choose_fill(whole, Role("positions", 9)) == Fill("arange", high=9)
    assert choose_fill(number, Role("mask")) == choose_fill(whole, Role("mask")) == Fill("ones")
    assert choose_fill(whole, Role("padding")) == Fill("zeros")
    assert choose_fill(number, Role("bias")) == choose_fill(number, None) == Fill("normal")
    assert choose_fill(whole, None) == Fill("ones")


def test_decoder_with_other_names_generates_the_same(decoder: Path, package: Path, tmp_path: Path) -> None:
    model = ir.load(decoder)
    for number, value in enumerate(model.graph.inputs):
        value.name = f"x{number}"
    ir.save(model, tmp_path / "model.onnx", external_data="weights")
    plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode="layer"))
    compile_model(plan, tmp_path / "package")
    with Session(tmp_path / "package") as session, Session(package) as named:
        expected = list(named.generate([1, 2, 3], max_new_tokens=8))
        assert list(session.generate([1, 2, 3], max_new_tokens=8)) == expected


@pytest.mark.parametrize("kind", ["ScatterElements", "of any shape", "ScatterND", "GatherND"])
def test_places_are_below_the_number_of_rows(kind: str, tmp_path: Path) -> None:
    """As for nodes of several graphs, whose values are summed by graph."""
    block = Block(18)
    x, place = block.data("x", (5, HIDDEN), ["n", HIDDEN]), block.input("g", INT, ["n"])
    listed = block.op("Unsqueeze", place, block.ints(1))
    graphs = block.w("graphs", 2, HIDDEN)
    if kind == "GatherND":
        block.give(block.op("Add", x, block.op(kind, graphs, listed)), shape=["n", HIDDEN])
    else:
        sizes = block.input("sizes", INT, ["rank"]) if kind == "of any shape" else block.op("Shape", x)
        places = listed if kind == "ScatterND" else block.op("Expand", listed, sizes)
        operator = "ScatterND" if kind == "ScatterND" else "ScatterElements"
        block.give(block.op(operator, graphs, places, x, reduction="add"), shape=[2, HIDDEN])
    role = roles_of(block, tmp_path)["g"]
    assert role.rows == 2 and choose_fill(place, role).high == 2
