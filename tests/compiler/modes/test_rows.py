"""Rows of several inputs, and rows of rotary tables that are computed for each token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.modes.rows import NoRowsError
from splitc.runtime import Session
from tests.conftest import assert_close, run_whole
from tests.helpers.blocks import FLOAT, INT, Block
from tests.helpers.needs import needs_later_operators

WIDTH, HEADS, TOKENS = 32, 2, 3


def check_rows(block: Block, folder: Path, rows: set[str]) -> None:
    """Check that these inputs and outputs have rows, and that requests with any number of rows are right."""
    save(block.model(), folder / "model.onnx")
    shapes = {name: feed.shape for name, feed in block.feeds.items()}
    plan = plan_model(folder / "model.onnx", "2xcpu", Request(split_mode="batch", shapes=shapes, memory=["1GiB"]))
    assert plan.replicas is not None and set(plan.replicas.rows) == rows
    compile_model(plan, folder / "package", verify=False)
    with Session(folder / "package") as session:
        for count in (5, 4, 1):
            feeds = {n: np.resize(f, (count, *f.shape[1:])) if n in rows else f for n, f in block.feeds.items()}
            assert_close(session.run(feeds), run_whole(folder / "model.onnx", feeds))


def refuse_rows(block: Block, folder: Path, why: str) -> None:
    save(block.model(), folder / "model.onnx")
    shapes = {name: feed.shape for name, feed in block.feeds.items()}
    with pytest.raises(NoRowsError, match=why):
        plan_model(folder / "model.onnx", "2xcpu", Request(split_mode="batch", shapes=shapes, memory=["1GiB"]))


def layer(b: Block, value: ir.Value, name: str) -> ir.Value:
    return b.op("Tanh", b.op("MatMul", value, b.w(name, WIDTH, WIDTH)))


def two_inputs(symbol: str) -> tuple[Block, ir.Value, ir.Value]:
    """A value of one input, and one of another input whose rows have this symbol."""
    b = Block(21)
    x, memory = b.data("x", (2, WIDTH), ["batch", WIDTH]), b.data("memory", (2, WIDTH), [symbol, WIDTH])
    return b, layer(b, layer(b, x, "up"), "down"), memory


def test_what_is_given_as_it_is_has_rows_of_its_own(tmp_path: Path) -> None:
    """As in a decoder that returns the encoder's states. By its symbol, the number of rows is the same."""
    b, y, memory = two_inputs("batch")
    b.give(y, "y", ["batch", WIDTH])
    b.give(b.op("Identity", memory), "same", ["batch", WIDTH])
    check_rows(b, tmp_path, {"x", "y", "memory", "same"})


def test_output_of_weights_alone_has_no_rows(tmp_path: Path) -> None:
    """As CLIP's logit scale."""
    b, y, _ = two_inputs("batch")
    b.give(y, "y", ["batch", WIDTH])
    b.give(b.op("Exp", b.constant(0.5, np.float32)), "scale", [])
    check_rows(b, tmp_path, {"x", "y", "memory"})


def test_inputs_that_only_have_sizes_are_divided_too(tmp_path: Path) -> None:
    """A rank may take the number of rows from their shapes."""
    b, y, memory = two_inputs("batch")
    b.data("unread", (2, WIDTH), ["batch", WIDTH])
    begin = b.op("Expand", b.w("begin", 1, WIDTH), b.op("Concat", b.shape(memory, 0), b.ints(WIDTH), axis=0))
    b.give(layer(b, b.op("Add", y, begin), "out"), "y", ["batch", WIDTH])
    check_rows(b, tmp_path, {"x", "y", "memory", "unread"})


def test_rows_of_several_inputs_that_meet_are_no_rows(tmp_path: Path) -> None:
    """Each row of one with all rows of the other, as in the logits of two towers."""
    b, y, memory = two_inputs("batch")
    b.give(y, "own", ["batch", WIDTH])
    b.give(b.op("MatMul", y, b.op("Transpose", memory, perm=[1, 0])), "y", ["batch", "batch"])
    b.give(b.op("Identity", memory), "same", ["batch", WIDTH])
    refuse_rows(b, tmp_path, "the output '(own|same)' has no axis for the rows along axis 0 of '(x|memory)'")


def test_rows_of_another_number_are_other_rows(tmp_path: Path) -> None:
    b, y, memory = two_inputs("others")
    b.give(y, "y", ["batch", WIDTH])
    b.give(b.op("Identity", memory), "same", ["others", WIDTH])
    refuse_rows(b, tmp_path, "the output '(y|same)' has no axis for the rows along axis 0 of '(x|memory)'")


def test_indices_that_only_choose_what_is_computed_are_no_rows(tmp_path: Path) -> None:
    """As the tokens whose logits are computed: each group of devices would compute all that they choose from."""
    b = Block(21)
    x = b.data("x", (2, TOKENS, WIDTH), ["batch", TOKENS, WIDTH])
    y = b.op("Sub", x, b.op("ReduceMean", x, b.ints(0)))
    kept = b.op("Gather", layer(b, y, "up"), b.indices("kept", [0, 2], ["kept"]), axis=1)
    b.give(layer(b, kept, "down"), "y", ["batch", "kept", WIDTH])
    refuse_rows(b, tmp_path, "the rows along axis 0 of 'x' are not independent: .*ReduceMean")


def test_indices_of_a_table_that_is_an_input_are_rows(tmp_path: Path) -> None:
    b = Block(21)
    table, ids = b.data("table", (5, WIDTH)), b.indices("ids", [0, 4, 2], ["batch"])
    b.give(layer(b, b.op("Gather", table, ids), "up"), "y", ["batch", WIDTH])
    check_rows(b, tmp_path, {"ids", "y"})


def recurrent(b: Block, rows: ir.Value, kind: str, gates: int) -> ir.Value:
    """A recurrent network over five positions of each row, in both directions, with lengths and an initial state."""
    v = b.op("Transpose", b.op("Reshape", rows, b.ints(0, 5, 4)), perm=[1, 0, 2])
    weights = b.w(f"{kind} W", 2, gates * 3, 4), b.w(f"{kind} R", 2, gates * 3, 3)
    count = b.shape(rows, 0)
    lengths = b.op("Cast", b.op("Expand", b.ints(4), count), to=ir.DataType.INT32)
    first = b.op("Expand", b.w(f"{kind} state", 2, 1, 3), b.op("Concat", b.ints(2), count, b.ints(3), axis=0))
    _, last = b.ops(kind, v, *weights, None, lengths, first, outputs=2, hidden_size=3, direction="bidirectional")
    return b.op("Transpose", last, perm=[1, 0, 2])


def of_each_row(b: Block, x: ir.Value) -> Iterator[ir.Value]:
    """Operators that act on the 20 numbers of each row separately."""
    yield from (recurrent(b, x, kind, gates) for kind, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1)))
    image = b.op("Reshape", x, b.ints(0, 4, 1, 5))
    yield b.op("LRN", image, size=3)
    yield b.op("MeanVarianceNormalization", image, axes=[1, 2, 3])
    yield b.op("SpaceToDepth", b.op("DepthToSpace", image, blocksize=2), blocksize=2)
    yield b.op("Trilu", b.op("Reshape", x, b.ints(0, 4, 5)))
    yield b.op("OneHot", b.op("ArgMax", x, axis=1), b.ints(20), b.constant([0, 1], np.float32))
    yield b.op("DeformConv", image, b.w("filters", 2, 4, 1, 1), b.op("Slice", image, b.ints(0), b.ints(2), b.ints(1)))
    yield b.op("GridSample", image, b.op("Reshape", b.op("Tanh", x), b.ints(0, 5, 2, 2)))
    yield b.op("Col2Im", b.op("Reshape", x, b.ints(0, 4, 5)), b.ints(1, 6), b.ints(1, 2))
    signal = b.op("Reshape", x, b.ints(0, 20, 1))
    yield b.op("DFT", signal)
    yield b.op("STFT", signal, b.constant(4, np.int64), b.w("window", 8))
    lengths = b.op("Expand", b.ints(3), b.shape(x, 0))
    yield b.op("ReverseSequence", signal, lengths, batch_axis=0, time_axis=1)
    yield from (b.op("Cast", made, to=FLOAT) for made in of_a_table(b, x))


def of_a_table(b: Block, x: ir.Value) -> Iterator[ir.Value]:
    """Classical machine learning operators on the 20 features of each row."""
    domain = "ai.onnx.ml."
    yield b.op(f"{domain}Scaler", x, offset=[0.1] * 20, scale=[0.1 * n for n in range(20)])
    yield b.op(f"{domain}FeatureVectorizer", x, x, inputdimensions=[20, 20])
    linear = {"coefficients": [0.1 * (n % 7) - 0.3 for n in range(40)], "intercepts": [0.5, 0.1]}
    yield b.op(f"{domain}LinearRegressor", x, targets=2, **linear)
    labels, scores = b.ops(f"{domain}LinearClassifier", x, outputs=2, classlabels_ints=[4, 7], **linear)
    yield from (labels, scores, b.op(f"{domain}OneHotEncoder", labels, cats_int64s=[4, 7]))
    best = b.op("ArgMax", scores, axis=1)
    yield b.op(f"{domain}ArrayFeatureExtractor", x, b.ints(3, 1))
    yield b.op("Reshape", b.op(f"{domain}ArrayFeatureExtractor", b.w("names", 1, 2), best), b.ints(-1, 1))


@needs_later_operators
def test_operators_that_take_each_row_by_itself(tmp_path: Path) -> None:
    b = Block(20)
    x = b.data("x", (4, 20), ["batch", 20])
    made = {f"y{number}": value for number, value in enumerate(of_each_row(b, x))}
    for name, value in made.items():
        b.give(value, name)
    check_rows(b, tmp_path, {"x", *made})


def test_image_that_is_made_small(tmp_path: Path) -> None:
    """Smaller sizes than the planned ones would leave no elements."""
    b = Block(22)
    v = b.data("x", (2, 3, 64, 32), ["batch", 3, "height", "width"])
    for number, channels in enumerate((3, 4, 4, 4)):
        v = b.op("Relu", b.op("Conv", v, b.w(f"filters {number}", 4, channels, 2, 2), strides=[2, 2]))
    b.give(b.op("GlobalMaxPool", v), "y", ["batch", 4, 1, 1])
    check_rows(b, tmp_path, {"x", "y"})


def numbers(b: Block, ids: ir.Value) -> ir.Value:
    """0, 1, ... for all tokens of all rows, [rows, tokens]."""
    count = b.op("ReduceProd", b.op("Shape", ids), keepdims=0)
    return b.op("Reshape", b.op("Range", zero(b), count, b.constant(1, np.int64)), b.op("Shape", ids))


def zero(b: Block) -> ir.Value:
    return b.constant(0, np.int64)


def backwards(b: Block, ids: ir.Value) -> ir.Value:
    last = b.op("Sub", b.op("ReduceProd", b.op("Shape", ids), keepdims=0), b.constant(1, np.int64))
    return b.op("Sub", last, numbers(b, ids))


def turned(number: Callable[[Block, ir.Value], ir.Value], padded: bool) -> Block:
    """Heads rotated by tables with a row for each token of the request, and maybe padding rows."""
    b = Block(21)
    x = b.data("x", (2, TOKENS, WIDTH), ["batch", TOKENS, WIDTH])
    ids = b.indices("ids", np.arange(2 * TOKENS).reshape(2, TOKENS) % 4, ["batch", TOKENS])
    angles = b.op("Mul", b.op("Cast", b.op("Unsqueeze", ids, b.ints(-1)), to=1), b.w("rates", WIDTH // HEADS // 2))
    tables = [b.op("Reshape", b.op(kind, angles), b.ints(-1, WIDTH // HEADS // 2)) for kind in ("Cos", "Sin")]
    if padded:
        more = [b.w(name, 7, WIDTH // HEADS // 2) for name in ("cosines", "sines")]
        tables = [b.op("Concat", *pair, axis=0) for pair in zip(tables, more, strict=True)]
    value = layer(b, x, "up")
    value = b.op("com.microsoft.RotaryEmbedding", value, number(b, ids), *tables, num_heads=HEADS)
    b.give(layer(b, value, "down"), "y", ["batch", TOKENS, WIDTH])
    return b


@pytest.mark.parametrize("padded", [False, True])
def test_tables_with_a_row_for_each_token(padded: bool, tmp_path: Path) -> None:
    check_rows(turned(numbers, padded), tmp_path, {"x", "ids", "y"})


def test_tables_that_are_read_elsewhere_tell_rows_apart(tmp_path: Path) -> None:
    refuse_rows(turned(backwards, False), tmp_path, "'/com.microsoft.RotaryEmbedding'|RotaryEmbedding|told apart")


def test_what_picks_nothing_tells_no_rows_apart(tmp_path: Path) -> None:
    """The model takes the tokens behind the last one, of which there are none, and compares rows."""
    b = Block(21)
    x = b.data("x", (2, TOKENS, WIDTH), ["batch", "tokens", WIDTH])
    count = b.op("Gather", b.op("Shape", x), b.constant(1, np.int64))
    behind = b.op("Gather", x, b.op("Range", count, count, b.constant(1, np.int64)), axis=1)
    both = b.op("Softmax", b.op("Concat", x, behind, axis=1), axis=0)
    b.give(layer(b, both, "up"), "y", ["batch", "tokens", WIDTH])
    refuse_rows(b, tmp_path, "not independent: node '/Gather_1' .Gather.: it selects elements by index")


def test_rows_of_images_whose_sides_are_halved_and_doubled(tmp_path: Path) -> None:
    """Primes do not fit as sides, and only one height fits at all. One row is planned."""
    b = Block()
    x = b.data("x", (1, 2, 8, 8), ["batch", 2, "height", "width"])
    half = b.op("Conv", x, b.w("smaller", 4, 2, 2, 2), strides=[2, 2])
    double = b.op("Resize", half, None, b.constant([1, 1, 2, 2], np.float32), mode="nearest")
    both = b.op("Conv", b.op("Concat", x, double, axis=1), b.w("both", 6, 6, 1, 1))
    b.give(b.op("Squeeze", b.op("AveragePool", both, kernel_shape=[8, 1]), b.ints(2)), "y", ["batch", 6, "columns"])
    check_rows(b, tmp_path, {"x", "y"})


@pytest.mark.parametrize("meet", [False, True])
def test_rows_of_sizes_that_no_primes_fit(meet: bool, tmp_path: Path) -> None:
    """The length is cut into chunks of four, and each row takes its own flag by number. One row is planned."""
    b = Block()
    x, flags = b.data("x", (1, 8, WIDTH), ["batch", "length", WIDTH]), b.data("flags", (1, 8), ["batch", "length"])
    count, length = b.shape(x, 0), b.shape(x, 1)
    own = b.op("Gather", flags, b.op("Range", zero(b), b.op("Squeeze", count), b.constant(1, np.int64)))
    marked = b.op("Mul", x, b.op("Unsqueeze", own, b.ints(2)))
    y = b.op("Softmax", marked, axis=0) if meet else marked
    chunks = b.op("Concat", count, b.op("Div", length, b.ints(4)), b.ints(4, WIDTH), axis=0)
    whole = b.op("Reshape", b.op("Neg", b.op("Reshape", y, chunks)), b.op("Concat", count, length, b.ints(-1), axis=0))
    b.give(layer(b, b.op("Add", whole, x), "up"), "y", ["batch", "length", WIDTH])
    if meet:
        refuse_rows(b, tmp_path, "along axis 0 of 'x' are not independent: .*Softmax")
    else:
        check_rows(b, tmp_path, {"x", "flags", "y"})


@pytest.mark.parametrize("differ", [False, True])
def test_mask_that_follows_from_sizes_is_picked_by_row_numbers(differ: bool, tmp_path: Path) -> None:
    """As for images without padding: a mask of ones, from which each row takes its own by number."""
    b = Block(21)
    x = b.data("x", (2, TOKENS, WIDTH), ["batch", TOKENS, WIDTH])
    one, count = b.constant(1, np.int64), b.shape(x, 0)
    ones = b.op("Expand", b.constant([[1.0]], np.float32), b.op("Concat", count, b.ints(TOKENS), axis=0))
    rows = b.op("Range", zero(b), b.op("Squeeze", count), one)
    row = b.op("Expand", b.op("Reshape", rows, b.ints(-1, 1, 1)), b.op("Concat", count, b.ints(TOKENS, 1), axis=0))
    place = b.op("Expand", b.constant(np.arange(TOKENS).reshape(1, -1, 1), np.int64), b.op("Shape", row))
    mask = b.op("GatherND", ones, b.op("Concat", row, place, axis=-1))
    if differ:
        mask = b.op("Add", mask, b.op("Cast", b.op("Squeeze", row, b.ints(2)), to=FLOAT))
    b.give(layer(b, b.op("Add", x, b.op("Unsqueeze", mask, b.ints(2))), "up"), "y", ["batch", TOKENS, WIDTH])
    if differ:
        refuse_rows(b, tmp_path, "may treat rows differently, as it reads numbers computed from sizes")
    else:
        check_rows(b, tmp_path, {"x", "y"})


def test_the_last_sizes_that_are_tried_say_where_rows_meet(tmp_path: Path) -> None:
    """Rows of a mask with its own symbol are taken by number, and a table of one row is for one row."""
    b = Block(23)
    x = b.data("x", (1, HEADS, TOKENS, WIDTH), ["batch", HEADS, TOKENS, WIDTH])
    mask = b.data("mask", (1, TOKENS), ["rows", TOKENS])
    rows = b.op("Range", zero(b), b.op("Squeeze", b.shape(x, 0)), b.constant(1, np.int64))
    own = b.op("Unsqueeze", b.op("Gather", mask, rows), b.ints(1, 3))
    tables = b.constant(np.ones((1, TOKENS, WIDTH // 2)), np.float32)
    y = b.op("RotaryEmbedding", b.op("Mul", x, own), tables, tables)
    b.give(layer(b, y, "up"), "y", ["batch", HEADS, TOKENS, WIDTH])
    refuse_rows(b, tmp_path, r"\(RotaryEmbedding\): it could not be tried: .*same shape")


def test_rows_of_texts(tmp_path: Path) -> None:
    """A label's text is read again as a number: texts are cut and tried as numbers are."""
    b = Block(21)
    x = b.data("x", (3, WIDTH), ["batch", WIDTH])
    texts = ir.StringTensor(np.array([str(number).encode() for number in range(WIDTH)], object), name="texts")
    chosen = b.op("ArgMax", layer(b, x, "up"), axis=-1, keepdims=0)
    number = b.op("Cast", b.op("Gather", b.weight("texts", texts), chosen), to=int(FLOAT))
    b.give(b.op("Mul", layer(b, x, "down"), b.op("Unsqueeze", number, b.ints(1))), "y", ["batch", WIDTH])
    check_rows(b, tmp_path, {"x", "y"})


@pytest.mark.parametrize("opset", [7, 9])
def test_rows_of_an_old_opset(opset: int, tmp_path: Path) -> None:
    """What corrects sizes is in these opsets too: 9 lacks Mod, 7 Where."""
    b = Block(opset)
    y = b.op("MatMul", b.data("x", (3, WIDTH), ["batch", WIDTH]), b.w("up", WIDTH, WIDTH))
    sizes = b.op("Concat", b.op("Gather", b.op("Shape", y), b.ints(0)), b.ints(HEADS, -1), axis=0)
    b.give(b.op("Reshape", y, sizes), "y", ["batch", HEADS, WIDTH // HEADS])
    check_rows(b, tmp_path, {"x", "y"})


def test_rows_that_are_counted_by_another_input(tmp_path: Path) -> None:
    """As the encoder's states in a decoder, whose ids have another symbol for the rows."""
    b = Block(21)
    image = layer(b, b.data("image", (2, TOKENS, WIDTH), ["images", TOKENS, WIDTH]), "up")
    x = b.data("x", (2, WIDTH), ["texts", WIDTH])
    heads = b.op("Reshape", image, b.op("Concat", b.shape(x, 0), b.ints(TOKENS, HEADS, -1), axis=0))
    pooled = b.op("Reshape", b.op("ReduceMax", heads, b.ints(1), keepdims=0), b.op("Shape", x))
    b.give(b.op("Add", x, pooled), "y", ["texts", WIDTH])
    check_rows(b, tmp_path, {"image", "x", "y"})


def test_tables_that_follow_from_sizes_are_alike_in_all_rows(tmp_path: Path) -> None:
    """Rows and tokens are one axis of theirs, and tokens are as many as a constant has whose shape no inference tells.

    A mask is picked by row numbers besides, without which no number is looked at.
    """
    b = Block(21)
    x = b.data("x", (2, TOKENS, WIDTH), ["batch", TOKENS, WIDTH])
    written = b.op("ScatterND", *(b.constant([[0]] * n, np.int64) for n in (TOKENS, 1)), b.constant([[1]], np.int64))
    count, length = b.shape(x, 0), b.op("Gather", b.op("Shape", written), b.ints(0))
    tokens, rows = (b.op("Range", zero(b), b.op("Squeeze", n), b.constant(1, np.int64)) for n in (length, count))
    places = b.op("Expand", tokens, b.op("Concat", count, length, axis=0))
    angles = b.op("Mul", b.op("Cast", b.op("Reshape", places, b.ints(-1, 1)), to=FLOAT), b.w("rates", WIDTH // 8))
    merged = b.op("Reshape", b.op("Gather", x, rows, axis=0), b.ints(1, -1, WIDTH))
    tables = (b.op(kind, angles) for kind in ("Cos", "Sin"))
    merged = b.op("com.microsoft.RotaryEmbedding", merged, b.ints(0), *tables, num_heads=4)
    b.give(layer(b, b.op("Reshape", merged, b.op("Shape", x)), "up"), "y", ["batch", TOKENS, WIDTH])
    check_rows(b, tmp_path, {"x", "y"})


def pooled(b: Block, made: str) -> None:
    """One token of each row, as exporters write `x[arange(rows), chosen]`, after a layer."""
    x = b.data("x", (2, TOKENS, WIDTH), ["batch", "tokens", WIDTH])
    count, length = b.op("Squeeze", b.shape(x, 0)), b.shape(x, 1)
    first = b.op("Mul", b.op("Range", zero(b), count, b.constant(1, np.int64)), length)
    if made == "any":
        chosen = b.indices("chosen", np.array([1, 0]), ["batch"])
    else:
        chosen = b.op("ArgMax", b.op("ReduceSum", x, b.ints(2), keepdims=0), axis=-1, keepdims=0)
    index = b.op("Add", chosen, first)
    if made == "given":
        b.give(index, "index", ["batch"], dtype=INT)
    picked = b.op("Gather", b.op("Reshape", layer(b, x, "up"), b.ints(-1, WIDTH)), index, axis=0)
    b.give(b.op("Reshape", picked, b.op("Concat", b.op("Shape", index), b.ints(WIDTH), axis=0)), "y", ["batch", WIDTH])


@pytest.mark.parametrize("made", ["chosen", "any", "given"])
def test_token_of_each_row_that_is_picked_from_all(made: str, tmp_path: Path) -> None:
    """A token chosen within its row stays in it; an arbitrary number may not. The model may give the index."""
    b = Block(21)
    pooled(b, made)
    if made == "chosen":
        check_rows(b, tmp_path, {"x", "y"})
    else:
        refuse_rows(b, tmp_path, "not independent: node")


def test_output_of_whose_shape_nothing_is_said(tmp_path: Path) -> None:
    """Neither the model nor inference knows it."""
    b = Block()
    x = b.data("x", (2, TOKENS), ["batch", "tokens"])
    shape = b.op("Shape", x)
    known = b.op("Where", b.op("Equal", shape, b.ints(-1)), b.ints(1), shape)
    places = b.op("Slice", b.w("places", 1, 8), b.ints(0), b.shape(x, 1), b.ints(1))
    moved = b.op("Add", x, b.op("Expand", places, known))
    y = layer(b, b.op("MatMul", b.op("Unsqueeze", moved, b.ints(2)), b.w("in", 1, WIDTH)), "up")
    b.give(y)
    y.shape = None
    check_rows(b, tmp_path, {"x", "y"})


@pytest.mark.parametrize("window", [64, 4096])
def test_windows_of_which_there_is_one(window: int, tmp_path: Path) -> None:
    """In short requests, also the probe; in longer ones, all rows' first windows precede their second ones."""
    b = Block()
    x = b.data("x", (2, window + 1 if window > 1000 else 5, WIDTH), ["batch", "tokens", WIDTH])
    batch, tokens = (b.op("Slice", b.op("Shape", x), b.ints(axis), b.ints(axis + 1)) for axis in (0, 1))
    lacking = b.op("Mod", b.op("Sub", b.ints(window), b.op("Mod", tokens, b.ints(window))), b.ints(window))
    whole = b.op("Pad", x, b.op("Concat", b.ints(0, 0, 0, 0), lacking, b.ints(0), axis=0))
    count = b.op("Div", b.op("Slice", b.op("Shape", whole), b.ints(1), b.ints(2)), b.ints(window))
    windows = b.op("Reshape", whole, b.op("Concat", batch, count, b.ints(window, WIDTH), axis=0))
    turned = b.op("Transpose", windows, perm=[1, 0, 2, 3])
    b.give(layer(b, b.op("Reshape", turned, b.ints(-1, window, WIDTH)), "up"), shape=["rows", window, WIDTH])
    refuse_rows(b, tmp_path, "the rows of a batch can't be divided")


def test_attention_of_tokens_that_are_joined(tmp_path: Path) -> None:
    """No value has the planned number of the first ones alone. Its kernel takes as many as the mask has columns."""
    b = Block()
    first, last = (
        b.data("first", (2, 5, WIDTH), ["batch", "tokens", WIDTH]),
        b.data("last", (2, 4, WIDTH), ["batch", 4, WIDTH]),
    )
    tokens = b.op("Concat", layer(b, first, "up"), last, axis=1)
    query, key, value = (b.op("MatMul", tokens, b.w(name, WIDTH, width)) for name, width in zip("qkv", (WIDTH, 8, 8)))
    pasts = [b.data(name, (2, 1, 0, 8), ["batch", 1, "past", 8]) for name in ("past_key", "past_value")]
    total = b.op("Cast", b.shape(tokens, 1), to=ir.DataType.INT32)
    lasts = b.op("Expand", b.op("Sub", total, b.constant([1], np.int32)), b.shape(tokens, 0))
    bias = b.data("bias", (1, 1, 9, 9), [1, 1, "new", "all"])
    inputs = [query, key, value, *pasts, lasts, total, None, None, None, bias]
    heads, *presents = b.ops("com.microsoft.GroupQueryAttention", *inputs, outputs=3, num_heads=4, kv_num_heads=1)
    b.give(heads, "y", ["batch", "joined", WIDTH])
    for name, present in zip(("present_key", "present_value"), presents, strict=True):
        b.give(present, name, ["batch", 1, "total", 8])
    check_rows(b, tmp_path, {"first", "last", "y", "past_key", "past_value", "present_key", "present_value"})


def test_pairs_of_rows_are_no_rows(tmp_path: Path) -> None:
    """As in a matrix of similarities."""
    b, y, _ = two_inputs("batch")
    b.give(b.op("MatMul", y, b.op("Transpose", y, perm=[1, 0])), "y", ["batch", "batch"])
    refuse_rows(b, tmp_path, "not independent: .*MatMul.* an element for each pair of them")


def test_number_of_rows_is_no_number_to_compute_with(tmp_path: Path) -> None:
    b, y, _ = two_inputs("batch")
    b.give(b.op("Div", y, b.op("Cast", b.shape(y, 0), to=FLOAT)), "y", ["batch", WIDTH])
    refuse_rows(b, tmp_path, "not independent: .*Div.* computes with their number")


def test_axis_of_a_known_size_is_no_rows(tmp_path: Path) -> None:
    """Also if nothing is known of the output's."""
    b = Block()
    x = b.data("x", (3, WIDTH), ["batch", WIDTH])
    twice = b.op("Concat", x, b.op("Neg", x), axis=0)
    y = b.op("CumSum", b.op("Slice", twice, b.shape(x, 0), b.ints(2**62), b.ints(0)), b.constant(0, np.int64))
    b.give(y)
    y.shape = None
    refuse_rows(b, tmp_path, "not independent: .*CumSum")


def test_rows_that_several_rows_of_an_input_make_are_no_rows(tmp_path: Path) -> None:
    """As the views of an object: the runtime cuts no axis of both."""
    b = Block()
    x = b.data("x", (4, WIDTH), ["views of all", WIDTH])
    b.give(layer(b, b.op("Reshape", x, b.ints(-1, 2, WIDTH)), "up"), "y", ["batch", 2, WIDTH])
    refuse_rows(b, tmp_path, "of dynamic size that stays one axis|sections")


def test_input_that_is_an_output_of_no_declared_shape(tmp_path: Path) -> None:
    b = Block()
    x = b.data("x", (3, WIDTH), ["batch", WIDTH])
    b.give(b.op("Softmax", layer(b, x, "up"), axis=-1), "y", ["batch", WIDTH])
    model = b.model()
    save(model, tmp_path / "model.onnx")
    proto = onnx.load(tmp_path / "model.onnx")
    proto.graph.output.append(onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, None))
    onnx.save(proto, tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", "2xcpu", Request(split_mode="batch", memory=["1GiB"]))
    assert plan.replicas is not None and plan.replicas.rows == {"x": 0, "y": 0}


@pytest.mark.parametrize("axis", [0, 1])
def test_row_for_all_may_be_many(axis: int, tmp_path: Path) -> None:
    """Sizes with which axes are related may leave one for all: nothing says that two symbols are of the same rows."""
    b = Block()
    scale = b.data("scale", (1, 1), ["scales", 1])
    shape = [2, WIDTH] if axis == 0 else [3, 2, WIDTH]
    x = b.data("x", shape, ["batch", WIDTH] if axis == 0 else [3, "batch", WIDTH])
    b.give(layer(b, b.op("Add", scale, x), "up"), "y", ["many", WIDTH] if axis == 0 else [3, "many", WIDTH])
    save(b.model(), tmp_path / "model.onnx")
    shapes = {name: feed.shape for name, feed in b.feeds.items()}
    plan = plan_model(tmp_path / "model.onnx", "2xcpu", Request(split_mode="batch", shapes=shapes, memory=["1GiB"]))
    assert plan.replicas is not None and plan.replicas.rows == {"scale": 0, "x": axis, "y": axis}
    compile_model(plan, tmp_path / "package", verify=False)
    with Session(tmp_path / "package") as session:
        for scales, rows in ((1, 2), (2, 2), (1, 5), (5, 5), (1, 1)):
            feeds = {"scale": np.resize(b.feeds["scale"], (scales, 1)) * np.arange(scales)[:, None].astype(np.float32)}
            feeds["x"] = np.resize(b.feeds["x"], (*shape[:axis], rows, WIDTH))
            assert_close(session.run(feeds), run_whole(tmp_path / "model.onnx", feeds))
