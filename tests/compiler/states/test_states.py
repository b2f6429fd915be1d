from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from models.writer import save
from splitc.compiler import Request, plan_model
from splitc.compiler.inference.shapes import infer_shapes
from splitc.compiler.modes.replanning import plan_from_file
from splitc.compiler.planning.plan_file import write_plan
from splitc.compiler.request.shapes import AskedStates, parse_states
from splitc.compiler.states.states import find_states
from splitc.runtime.errors import MisuseError
from splitc.runtime.package.states import State
from tests.helpers.blocks import FLOAT, INT, Block
from tests.helpers.graphs import read_graph


def test_each_past_finds_its_present(decoder: Path) -> None:
    graph = read_graph(decoder)
    infer_shapes(graph.model)
    states = find_states(graph)
    assert len(states) == 4
    assert State("past_key_values.1.value", "present.1.value", grows=2) in states
    assert all(state.input.split(".")[1:] == state.output.split(".")[1:] for state in states)


def test_recurrent_state_is_found_and_a_plain_output_is_not(write_model: Callable[[str], Path]) -> None:
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[t, 1, 4] x, float[1, 1, 2] h) => (float[t, 1, 1, 2] y, float[1, 1, 2] hn)
        <float[1, 2, 4] w = {1,2,3,4,5,6,7,8}, float[1, 2, 2] r = {1,2,3,4}>
        { y, hn = RNN <hidden_size = 2> (x, w, r, , , h) }"""
    )
    graph = read_graph(path)
    infer_shapes(graph.model)
    assert find_states(graph) == [State("h", "hn")]


@pytest.mark.parametrize(
    ("last", "mixed", "is_state"),
    [
        ("h", "a = Mul (h, w)  b = Mul (p, w)  m = Add (a, b)", True),
        ("h", "m = Sub (p, h)", True),
        ("h", "b = Relu (p)  m = Add (h, b)", False),  # what is read is not the value itself
        ("Relu (h)", "m = Sub (p, h)", False),
    ],
)
def test_last_value_that_the_next_token_is_mixed_with_is_a_state(
    last: str, mixed: str, is_state: bool, write_model: Callable[[str], Path]
) -> None:
    """RWKV's token shift: the output does not depend on its past."""
    path = write_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (int64[b] ids, float[b, 4] p, float[b, 4] s) => (float[b, 2] y, float[b, 4] last, float[b, 4] sum)
        <float[4] w = {{1,2,3,4}}, float[4, 2] v = {{1,2,3,4,5,6,7,8}}, float[2, 4] table = {{1,2,3,4,5,6,7,8}}>
        {{ h = Gather (table, ids)  last = {last if "(" in last else f"Identity ({last})"}  {mixed}
           d = Mul (s, w)  sum = Add (d, m)  y = MatMul (sum, v) }}"""
    )
    graph = read_graph(path)
    infer_shapes(graph.model)
    assert (State("p", "last") in find_states(graph)) == is_state


def test_sizes_that_are_named_by_their_numbers_do_not_grow(tmp_path: Path) -> None:
    """As transformers' exporter writes the inputs' fixed sizes, of hybrid decoders too."""
    block = Block()
    state = block.input("p", FLOAT, ["b", "3", "4"])
    row = block.op(
        "Reshape", block.op("Gather", block.w("w", 5, 12), block.input("i", INT, ["b"])), block.ints(0, 3, 4)
    )
    block.give(block.op("Add", block.op("Mul", state, block.w("v", 3, 4)), row), "n", ["b", 3, 4])
    block.give(block.op("MatMul", row, block.w("u", 4, 2)), "y", ["b", 3, 2])
    assert states_of(block, tmp_path) == [State("p", "n")]


def test_output_of_unknown_sizes_keeps_the_files(tmp_path: Path) -> None:
    """The last columns of a convolution's state, by a slice of computed places."""
    block = Block()
    state, start = block.input("p", FLOAT, ["b", 4, "k"]), block.input("start", INT, [1])
    new = block.op("Gather", block.w("w", 5, 4, 1), block.input("i", INT, ["b"]))
    joined = block.op("Concat", state, new, axis=2)
    block.give(block.op("Slice", joined, start, block.ints(99), block.ints(2)), "n", ["b", 4, "k"])
    block.give(block.op("ReduceSum", joined, block.ints(2)), "y", ["b", 4, 1])
    assert states_of(block, tmp_path) == [State("p", "n")]


@pytest.mark.parametrize("size", [4, "4"])
def test_fixed_size_that_inference_does_not_know_does_not_grow(tmp_path: Path, size: int | str) -> None:
    """As of a convolution's state in a hybrid decoder of transformers' exporter."""
    block = Block()
    state, start = block.input("p", FLOAT, ["b", 3, size]), block.input("start", INT, [1])
    new = block.op("Gather", block.w("w", 5, 3, 1), block.input("i", INT, ["b"]))
    joined = block.op("Concat", state, new, axis=2)
    block.give(block.op("Slice", joined, start, block.ints(99), block.ints(2)), "n", ["b", 3, 4])
    block.give(block.op("ReduceSum", joined, block.ints(2)), "y", ["b", 3, 1])
    assert states_of(block, tmp_path) == [State("p", "n")]


def test_state_of_a_recurrence_is_multiplied_by_decays(tmp_path: Path) -> None:
    """As in the chunks of Mamba 2: the state is the first of them, and the last one is the new state."""
    block = Block()
    state, conv = block.input("p", FLOAT, ["b", 3, 4]), block.input("c", FLOAT, ["b", 3, 2])
    tokens = block.op("Gather", block.w("w", 5, 12), block.input("i", INT, ["b", "n"]))
    chunks = block.op("Reshape", tokens, block.ints(0, -1, 3, 4))
    joined = block.op("Concat", block.op("Unsqueeze", state, block.ints(1)), chunks, axis=1)
    decays = block.op("Exp", block.op("MatMul", tokens, block.w("d", 12, 9)))
    made = block.op("Einsum", decays, joined, equation="bnz,bchd->bzhd")
    block.give(block.op("Gather", made, block.constant(-1, np.int64), axis=1), "new", ["b", 3, 4])
    columns = block.op(
        "Slice",
        block.op("Concat", conv, block.op("Reshape", tokens, block.ints(0, 3, -1)), axis=2),
        block.ints(-2),
        block.ints(99),
        block.ints(2),
    )
    block.give(columns, "c_now", ["b", 3, 2])
    block.give(block.op("ReduceSum", made, block.ints(1)), "y", ["b", 1, 3, 4])
    assert [(one.input, one.output, one.grows) for one in states_of(block, tmp_path)] == [
        ("p", "new", None),
        ("c", "c_now", None),
    ]


def test_what_a_weight_multiplies_is_no_state_of_a_recurrence(tmp_path: Path) -> None:
    block = Block()
    state, conv = block.input("p", FLOAT, ["b", 3, 4]), block.input("c", FLOAT, ["b", 3, 2])
    tokens = block.op("Gather", block.w("w", 5, 6), block.input("i", INT, ["b"]))
    block.give(block.op("MatMul", state, block.w("u", 4, 4)), "new", ["b", 3, 4])
    rows = block.op("Concat", conv, block.op("Reshape", tokens, block.ints(0, 3, 2)), axis=2)
    block.give(block.op("Slice", rows, block.ints(-2), block.ints(99), block.ints(2)), "c_now", ["b", 3, 2])
    assert [one.input for one in states_of(block, tmp_path)] == ["c"]


def test_what_several_layers_write_to_is_a_state(tmp_path: Path) -> None:
    """Each layer's column, though it is computed from earlier layers' columns by products, as in RWKV."""
    block = Block()
    state, x = (
        block.input("p", FLOAT, ["b", 4, 9]),
        block.op("Gather", block.w("w", 5, 4), block.input("i", INT, ["b"])),
    )
    written = state
    for layer in range(9):
        places = block.op("Expand", block.ints(layer), block.op("Shape", block.op("Unsqueeze", x, block.ints(2))))
        old = block.op("GatherElements", written, places, axis=2)
        x = block.op("Add", x, block.op("MatMul", block.op("Squeeze", old, block.ints(2)), block.w(f"w{layer}", 4, 4)))
        written = block.op("ScatterElements", written, places, block.op("Unsqueeze", x, block.ints(2)), axis=2)
    block.give(written, "n", ["b", 4, 9])
    block.give(block.op("MatMul", x, block.w("u", 4, 2)), "y", ["b", 2])
    assert states_of(block, tmp_path) == [State("p", "n")]


def test_setting_of_a_cache_that_is_passed_on_is_a_state(tmp_path: Path) -> None:
    """As transformers' exporter writes the windows of sliding caches: no caller has to feed them."""
    block = Block()
    state, window = block.input("p", FLOAT, ["b", "past", 4]), block.input("window", INT, [])
    new = block.op("Gather", block.w("w", 5, 1, 4), block.input("i", INT, ["b"]))
    joined = block.op("Concat", state, new, axis=1)
    block.give(joined, "n", ["b", "past + 1", 4])
    block.give(block.op("ReduceSum", joined, block.ints(1)), "y", ["b", 1, 4])
    block.give(block.op("Identity", window), "window_now", [])
    assert states_of(block, tmp_path) == [State("p", "n", grows=1), State("window", "window_now")]


def states_of(block: Block, folder: Path) -> list[State]:
    save(block.model(), folder / "model.onnx")
    graph = read_graph(folder / "model.onnx")
    infer_shapes(graph.model)
    return find_states(graph)


LSTM = "LSTM <hidden_size = 1> (x, w, r, , , h, c)"


@pytest.mark.parametrize(
    "body",
    [
        f"y, hn, cn = {LSTM}",
        """y, hn, cn = If (first) <
            then_branch = a () => (y1, h1, c1) { y1, h1, c1 = """
        + LSTM
        + """ },
            else_branch = b () => (y2, h2, c2) { y2 = Expand (h, d)  c2 = Neg (c)  h2 = Neg (h) }
        >""",
    ],
    ids=["plain", "in a branch"],
)
def test_hidden_and_cell_states_are_told_apart(body: str, write_model: Callable[[str], Path]) -> None:
    """The order of the model's outputs does not matter."""
    path = write_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[1, 1, 1] x, float[1, 1, 1] h, float[1, 1, 1] c, bool first)
        => (float[1, 1, 1, 1] y, float[1, 1, 1] cn, float[1, 1, 1] hn)
        <float[1, 4, 1] w = {{1, 2, 3, 4}}, float[1, 4, 1] r = {{1, 2, 3, 4}}, int64[4] d = {{1, 1, 1, 1}}>
        {{ {body} }}"""
    )
    graph = read_graph(path)
    infer_shapes(graph.model)
    assert find_states(graph) == [State("c", "cn"), State("h", "hn")]


def test_output_that_is_only_alike_is_no_state(write_model: Callable[[str], Path]) -> None:
    """Products of equal widths compute something new; a model with nothing else has no states."""
    for x, outputs, body in (
        ("x", "float[n, 2] y, float[n, 4] z", "a = MatMul(x, w) y = MatMul(a, w) z = Concat <axis = 1> (x, y)"),
        ("x", "float[n, 2] y", "y = Relu(x)"),
        (
            "x",
            "float[n, 2] y, float[n, 4] z",
            "a = MatMul(x, w) y = Add(x, a) z = Concat <axis = 1> (a, other)",
        ),
    ):
        path = write_model(
            f"""<ir_version: 8, opset_import: ["" : 17]>
            g (float[n, 2] {x}, float[n, 2] other) => ({outputs})
            <float[2, 2] w = {{1, 2, 3, 4}}> {{ {body} }}"""
        )
        graph = read_graph(path)
        infer_shapes(graph.model)
        assert find_states(graph) == []


TWO = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[n, 2] x, float[n, 2] past, float[n, 3] wide, int64[n, 2] ids) => (float[n, 2] y, float[n, 2] present)
    <float[2, 2] w = {1, 2, 3, 4}> {
        a = ReduceMax <keepdims = 1> (wide)
        b = Cast <to = 1> (ids)
        c = Add(a, b)
        present = Add(past, c)
        y = MatMul(x, w)
    }"""


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (AskedStates(), {"past": "present"}),
        (AskedStates(alone=True), {}),
        (AskedStates({"x": "y"}), {"x": "y", "past": "present"}),
        (AskedStates({"x": "present"}), {"x": "present"}),
        (AskedStates({"x": "y"}, alone=True), {"x": "y"}),
    ],
)
def test_states_that_are_asked_for_go_before_those_found(
    asked: AskedStates, expected: dict[str, str], write_model: Callable[[str], Path], tmp_path: Path
) -> None:
    path = write_model(TWO)
    plan = plan_model(path, ["cpu0"], Request(states=asked.outputs, no_state=asked.alone))
    assert {state.input: state.output for state in plan.analysis.states} == expected
    write_plan(plan, tmp_path / "plan.json")
    assert plan_from_file(path, tmp_path / "plan.json").analysis.states == plan.analysis.states


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"none": "y"}, "--state none=y: the model has no input 'none': it has x, past, wide, ids"),
        ({"x": "none"}, "--state x=none: the model has no output 'none': it has y, present"),
        ({"ids": "y"}, "--state ids=y: the input takes INT64 and the output is FLOAT"),
        ({"wide": "y"}, "--state wide=y: the input takes n x 3 and the output is n x 2"),
        ({"x": "y", "past": "y"}, "--state past=y: the output replaces 'x' already"),
    ],
)
def test_what_can_be_no_state_is_refused(
    asked: dict[str, str], message: str, write_model: Callable[[str], Path]
) -> None:
    with pytest.raises(MisuseError, match=re.escape(message)):
        plan_model(write_model(TWO), ["cpu0"], Request(states=asked))


@pytest.mark.parametrize(
    ("changed", "is_state"),
    [
        ("o = Identity (x)", False),
        ("o = Mul (x, w)", False),
        ("n = Neg (x)  o = Concat <axis = 0> (x, n)", False),
        ("o = Add (x, t)", True),
        ("o = Concat <axis = 0> (x, t)", True),
    ],
)
def test_a_state_takes_in_another_input(write_model: Callable[[str], Path], changed: str, is_state: bool) -> None:
    """An image that comes out normalized is none."""
    path = write_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 2] x, float[1, 2] t) => (float[n, 2] y, float[m, 2] o)
        <float[2] w = {{1,2}}, float[2, 2] v = {{1,2,3,4}}> {{ y = MatMul (x, v)  {changed} }}"""
    )
    graph = read_graph(path)
    infer_shapes(graph.model)
    assert [state.input for state in find_states(graph)] == ["x"] * is_state


def test_states_are_read_from_text() -> None:
    assert parse_states(["a=b", "c.d=e"]) == {"a": "b", "c.d": "e"}
    for texts in (["a"], ["=b"], ["a="], ["a=b", "a=c"]):
        with pytest.raises(MisuseError, match="--state"):
            parse_states(texts)


def test_state_that_is_updated_element_by_element(write_model: Callable[[str], Path]) -> None:
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 2] x, float[n, 2] past) => (float[n, 2] y, float[n, 2] present)
        <float[2, 2] w = {1, 2, 3, 4}, float[2] decay = {0.5, 0.5}>
        { new = MatMul(x, w) old = Mul(past, decay) present = Add(old, new) y = MatMul(present, w) }"""
    )
    graph = read_graph(path)
    infer_shapes(graph.model)
    assert find_states(graph) == [State("past", "present")]
