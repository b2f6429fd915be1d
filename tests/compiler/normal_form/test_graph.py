"""Opening models: what is normalized, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.errors import ModelError
from splitc.runtime import Session
from tests.conftest import assert_close, run_whole
from tests.helpers.graphs import read_graph

WriteModel = Callable[[str], Path]


def test_functions_are_inlined(write_model: WriteModel) -> None:
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17, "local" : 1]>
        g (float[2] x) => (float[2] y) { y = local.twice(x) }
        <opset_import: ["" : 17], domain: "local"> twice (a) => (b) { b = Add(a, a) }"""
    )
    assert [node.op_type for node in read_graph(path).nodes] == ["Add"]


def test_constants_of_functions_are_cut_in_all_copies(write_model: WriteModel, tmp_path: Path) -> None:
    path = write_model(
        """<ir_version: 9, opset_import: ["" : 17, "local" : 1]>
        g (float[n, 4] x) => (float[n, 4] y) <float[4, 4] v = {1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8},
            float[4, 4] w = {4, 3, 2, 1, 8, 7, 6, 5, 4, 3, 2, 1, 8, 7, 6, 5}>
        { a = local.block (x, v)  b = local.block (a, w)  y = MatMul (b, v) }
        <opset_import: ["" : 17, "local" : 1], domain: "local"> block (x, w) => (y)
        { z = Constant <value = float[4] {0.1, 0.2, 0.3, 0.4}> ()
          m = local.line (x, w, z)  l = Relu (m)  y = Add (l, x) }
        <opset_import: ["" : 17], domain: "local"> line (x, w, b) => (y) { m = MatMul (x, w)  y = Add (m, b) }"""
    )
    for mode in ("layer", "tensor"):
        plan = plan_model(path, "2xcpu", Request(split_mode=mode, shapes={"x": (2, 4)}))
        compile_model(plan, tmp_path / mode)  # which compares it with the model


def test_decoder_inside_a_search_keeps_the_names_by_which_the_search_knows_it(
    write_model: WriteModel, tmp_path: Path
) -> None:
    """ONNX Runtime's search operators need these names, though values outside have the same ones."""
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        g (int32[batch, length] input_ids) => (int32[batch, most] sequences)
        <int32[1] most = {6}, int32[1] least = {1}, float[1] penalty = {1}>
        { sequences = com.microsoft.GreedySearch <eos_token_id = 1, pad_token_id = 0, model_type = 0, decoder = decoder
            (int32[batch, new] input_ids, int32[batch, new] position_ids, int32[batch, total] attention_mask,
             float[2, batch, 1, past, 2] past_0)
            => (float[batch, new, 4] logits, float[2, batch, 1, total, 2] present_0)
            <float[4, 4] table = {0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0}, int64[5] heads = {0, 0, 2, 1, 2}>
            { logits = Gather (table, input_ids)
              split = Reshape (logits, heads)
              new_0 = Transpose <perm = [2, 0, 3, 1, 4]> (split)
              present_0 = Concat <axis = 3> (past_0, new_0) }> (input_ids, most, least, penalty) }"""
    )
    compile_model(plan_model(path, "cpu0", Request(shapes={"input_ids": (2, 3)})), tmp_path / "package")
    feeds = {"input_ids": np.array([[2, 2, 2], [3, 3, 3]], np.int32)}
    with Session(tmp_path / "package", threads=1) as session:
        assert_close(session.run(feeds), run_whole(path, feeds))


def test_of_a_function_named_as_an_operator_the_operator_is_run(write_model: WriteModel, tmp_path: Path) -> None:
    """ONNX Runtime runs its own operator then, whatever the function computes."""
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1, "local" : 1]>
        g (float[2, 4] x) => (float[2, 4] y)
        <float[4, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8}>
        { a = MatMul(x, w)
          b = com.microsoft.Gelu(a)
          y = local.twice(b) }
        <opset_import: ["" : 17], domain: "com.microsoft"> Gelu (a) => (b) { b = Neg(a) }
        <opset_import: ["" : 17, "com.microsoft" : 1], domain: "local"> twice (a) => (b) {
          c = com.microsoft.Gelu(a)
          b = Add(c, c) }"""
    )
    assert [node.op_type for node in read_graph(path).nodes] == ["MatMul", "Gelu", "Gelu", "Add"]
    plan = plan_model(path, "2xcpu", Request(split_mode="layer", spread=True))
    compile_model(plan, tmp_path / "package")  # which compares it with the model


def test_constants_and_overridable_initializers_become_weights(write_model: WriteModel) -> None:
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[2] x, float[2] w) => (float[2] y) <float[2] w = {1, 2}>
        { c = Constant <value = float[2] {3, 4}> ()
          a = Add(x, w)
          y = Mul(a, c) }"""
    )
    graph = read_graph(path)
    assert [node.op_type for node in graph.nodes] == ["Add", "Mul"]
    assert [value.name for value in graph.graph.inputs] == ["x"]
    assert {value.name for node in graph.nodes for value in graph.weights(node)} == {"w", "c"}


def test_outputs_that_are_inputs_or_weights_keep_their_names(write_model: WriteModel) -> None:
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[2] x) => (float[2] x, float[2] w, float[2] y) <float[2] w = {1, 2}> { y = Add(x, w) }"""
    )
    graph = read_graph(path)
    assert [value.name for value in graph.graph.inputs] == ["x"]
    assert [value.name for value in graph.outputs] == ["x", "w", "y"]
    assert [value.name for value in graph.graph.outputs] == ["w", "y"]
    assert all(value.producer() is not None for value in graph.graph.outputs)


def test_an_output_may_be_a_small_weight_that_is_read_too(write_model: WriteModel) -> None:
    """Its Identity is folded, and inserted again."""
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 2] x) => (float[n, 2] y, float[1] scale) <float[1] scale = {2}, float[2, 2] w = {1, 2, 3, 4}>
        { a = MatMul(x, w)  y = Mul(a, scale) }"""
    )
    plan = plan_model(path, ["cpu0"], Request())
    assert [output.name for output in plan.analysis.graph.outputs] == ["y", "scale"]


def test_model_that_computes_nothing(write_model: WriteModel) -> None:
    path = write_model('<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] x) { }')
    with pytest.raises(ModelError, match="all its outputs are inputs"):
        read_graph(path)


def test_captured_values_are_read(write_model: WriteModel) -> None:
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[2] x, bool c) => (float[2] y) <float[2] w = {1, 2}>
        { a = Neg(x)
          y = If(c) <
            then_branch = t () => (float[2] u) { u = Add(a, w) },
            else_branch = e () => (float[2] v) { v = Identity(a) } > }"""
    )
    graph = read_graph(path)
    assert {value.name for value in graph.reads[graph.nodes[-1]]} == {"a", "w", "c"}


def test_outputs_that_are_left_out_stay_so_beside_an_if(write_model: WriteModel) -> None:
    """With a name, an engine would compute them, and ONNX Runtime's norms have some that no rule knows."""
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        g (float[1, 2, 4] x, bool c) => (float[1, 2, 4] y, float[1, 2, 4] s) <float[4] w = {1, 1, 1, 1}>
        { n, , , s = com.microsoft.SkipSimplifiedLayerNormalization(x, x, w)
          y = If(c) <
            then_branch = t () => (float[1, 2, 4] u) { u = Neg(n) },
            else_branch = e () => (float[1, 2, 4] v) { v = Abs(n) } > }"""
    )
    assert [value.name for value in read_graph(path).nodes[0].outputs] == ["n", "", "", "s"]


def test_nodes_in_any_order_keep_their_branches(write_model: WriteModel, tmp_path: Path) -> None:
    """ONNX Runtime sorts nodes, and its conversion to float16 leaves casts at the end: an If may follow its readers."""
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 4] x, bool c) => (float[n, 4] y)
        <float[4, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8}>
        { y = MatMul (b, w)
          b = Add (a, x)
          a = If (c) <then_branch = one () => (t) { t = Neg (x) },
                      else_branch = two () => (e) { e = MatMul (x, w) }> }"""
    )
    assert [node.op_type for node in read_graph(path).nodes] == ["If", "Add", "MatMul"]
    for settings in ({}, {"c": True}, {"c": False}):
        plan = plan_model(path, "1xcpu", Request(settings=settings, shapes={"x": (2, 4)}))
        compile_model(plan, tmp_path / f"package{len(settings)}", force=True)  # which compares it with the model


def test_what_concatenates_one_value_is_passed_by(write_model: WriteModel) -> None:
    """Also inside an If. An output keeps its name."""
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[2] x, bool c) => (float[2] y, float[2] z) {
          a = Concat <axis = 0> (x)
          b = Concat <axis = 0> (a)
          s = Add (b, b)
          y = If (c) <
            then_branch = t () => (float[2] p) { q = Concat <axis = 0> (s)  p = Neg (q) },
            else_branch = e () => (float[2] p) { p = Abs (b) }
          >
          z = Concat <axis = 0> (s)
        }"""
    )
    graph = read_graph(path)
    assert [node.op_type for node in graph.nodes] == ["Add", "If"]
    assert [value.name for value in graph.nodes[0].inputs if value is not None] == ["x", "x"]
    assert [value.name for value in graph.outputs] == ["y", "z"]
    assert graph.outputs[1] is graph.nodes[0].outputs[0]


def test_what_is_the_same_as_a_weight_is_passed_by(write_model: WriteModel) -> None:
    """Unless it is an output. TorchScript's exporter shares weights by Identity; engines hold each once."""
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[2] x) => (float[2] y, float[2] z) <float[2] w = {1, 2}> {
          v = Identity (w)
          u = Identity (v)
          a = Add (x, v)
          y = Mul (a, u)
          z = Identity (u)
        }"""
    )
    graph = read_graph(path)
    assert [node.op_type for node in graph.nodes] == ["Add", "Mul", "Identity"]
    assert {value.name for node in graph.nodes for value in graph.weights(node)} == {"w"}


@pytest.mark.parametrize(
    ("opset", "body", "imported"),
    [
        (7, "y = BatchNormalization <spatial = 1> (x, s, s, s, s)", 9),
        (8, "a = Flatten (x)  b = Sum (a, a, a)  y = MatMul (b, w)", 9),
        (7, "y = Upsample <scales = [1.0, 1.0, 2.0, 2.0]> (x)", 7),
        (6, "y = Relu (x)", 6),
        (10, "y = Relu (x)", 10),
    ],
)
def test_files_of_opsets_without_where_import_the_next_that_means_the_same(
    opset: int, body: str, imported: int, write_model: WriteModel, tmp_path: Path
) -> None:
    """Ranks mask what they add to a sum by Where."""
    path = write_model(
        f"""<ir_version: 4, opset_import: ["" : {opset}]> g (float[n, 2, 2, 1] x) => (y)
        <float[2] s = {{1, 2}}, float[4, 2] w = {{1, 2, 3, 4, 5, 6, 7, 8}}> {{ {body} }}"""
    )
    model = read_graph(path).model
    assert model.graph.opset_imports[""] == imported
    made, feeds = tmp_path / "imported.onnx", {"x": np.arange(12, dtype=np.float32).reshape(3, 2, 2, 1)}
    ir.save(model, made)
    assert_close(run_whole(made, feeds), run_whole(path, feeds))
