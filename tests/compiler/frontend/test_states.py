from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from splitc.compiler.frontend.shapes import infer_shapes
from splitc.compiler.frontend.states import find_states
from splitc.runtime.manifest import State
from tests.helpers.graphs import read_graph


def test_each_past_finds_its_present(decoder: Path) -> None:
    graph = read_graph(decoder)
    infer_shapes(graph.model)
    states = find_states(graph)
    assert len(states) == 8
    assert State("past_key_values.2.value", "present.2.value", grows=2) in states
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


def test_output_that_is_only_alike_is_no_state(write_model: Callable[[str], Path]) -> None:
    """Products of equal widths make something new; and a model that has nothing else has no states."""
    for x, outputs, body in (
        ("x", "float[n, 2] y, float[n, 4] z", "a = MatMul(x, w) y = MatMul(a, w) z = Concat <axis = 1> (x, y)"),
        ("x", "float[n, 2] y", "y = Relu(x)"),
    ):
        path = write_model(
            f"""<ir_version: 8, opset_import: ["" : 17]>
            g (float[n, 2] {x}, float[n, 2] other) => ({outputs})
            <float[2, 2] w = {{1, 2, 3, 4}}> {{ {body} }}"""
        )
        graph = read_graph(path)
        infer_shapes(graph.model)
        assert find_states(graph) == []


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
