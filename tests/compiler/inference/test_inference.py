from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import sympy
from onnx import numpy_helper
from onnx_shape_inference import SYM_DATA_KEY, _constraints, infer_symbolic_shapes, registry

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.inference import symbolic
from splitc.compiler.inference.shapes import bind_shapes, infer_shapes
from splitc.compiler.normal_form.normalize import replace_cast_like
from splitc.runtime import Session
from tests.conftest import assert_close, run_whole
from tests.helpers.graphs import read_graph

WriteModel = Callable[[str], Path]


def inferred(path: Path) -> dict[str, tuple[Any, ...]]:
    """The inferred shape and type of each value, and its elements if they are known."""
    model = read_graph(path).model
    infer_shapes(model)
    facts = {}
    for value in (value for node in model.graph for value in node.outputs):
        tensor = value.const_value
        elements = None if tensor is None else tensor.numpy().tolist()
        facts[value.name or ""] = value.shape, value.type, elements, dict(value.metadata_props)
    return facts


def test_rules_in_order_set_what_the_library_sets(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_order = inferred(decoder)
    monkeypatch.setattr(symbolic, "_infer_in_order", lambda model, *others: symbolic._infer_by_library(model))
    assert in_order == inferred(decoder)


def test_made_up_symbols_are_related_as_by_the_library(
    write_model: WriteModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[_d0, 4] x) => (int64[2, k] i, float[n, m] y)
        <int64[2] two = {0, -1}>
        { a = Reshape(x, two)
          i = NonZero(a)
          s = Shape(i)
          y = Relu(a) }"""
    )
    with monkeypatch.context() as patch:
        patch.setattr(symbolic, "infer_symbolic_shapes", lambda *arguments, **options: pytest.fail("not in order"))
        in_order = inferred(path)
    monkeypatch.setattr(symbolic, "_infer_in_order", lambda model, *others: symbolic._infer_by_library(model))
    assert in_order == inferred(path)
    assert in_order["i"][0] is not None


def test_a_rule_that_fails_in_any_way_leaves_its_node_to_onnx_runtime(
    write_model: WriteModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules read shapes that may not be known, and compute with sympy."""

    def fail(context: Any, node: ir.Node) -> None:
        raise AttributeError

    path = write_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 4] x) => (float[n, 4] y)
        { y = Relu(x) }
    """)
    monkeypatch.setattr(symbolic.RULES, "get", lambda *operator: symbolic._forgiving(fail))
    assert [str(size) for size in inferred(path)["y"][0]] == ["n", "4"]


def test_parts_of_computed_lengths_are_not_taken_for_equal_ones(write_model: WriteModel) -> None:
    facts = inferred(
        write_model(
            """<ir_version: 8, opset_import: ["" : 17]>
            g (float[n, 4] x, float[m, 4] z, int64[2] given) => (float[a, 4] first, float[b, 4] second, float[c, 4] any)
            { both = Concat <axis = 0> (x, z)
              rows = Shape <start = 0, end = 1> (x)
              others = Shape <start = 0, end = 1> (z)
              lengths = Concat <axis = 0> (rows, others)
              first, second = Split <axis = 0> (both, lengths)
              any, rest = Split <axis = -2> (both, given)
              unread = Relu (rest) }"""
        )
    )
    assert [str(facts[name][0][0]) for name in ("first", "second")] == ["n", "m"]
    assert "n" not in str(facts["any"][0][0])


def test_what_one_branch_tells_may_not_hold_for_the_other(write_model: WriteModel) -> None:
    """For example if a table without rows is flattened."""
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (bool empty, float[n, 4] x, int64[axes] sizes) => (int64 count)
        <int64[1] flat = {-1}>
        { a = Reshape(x, sizes)
          y = If (empty) <
              then_branch = flattened () => (float[k] b) { b = Reshape(a, flat) },
              else_branch = kept () => (float c) { c = Relu(a) }>
          count = Size(y) }"""
    )
    assert inferred(path)["y"][0] is None


def test_shape_arithmetic_is_folded_on_the_way(write_model: WriteModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As exporters write Expand. Where's rule creates symbols, and shapes were inferred several times."""
    graph = read_graph(
        write_model(
            """<ir_version: 8, opset_import: ["" : 17]>
            g (float[n, 1] x) => (float[a, b] y, float[a, b] z)
            <int64[2] asked = {-1, 4}, int64[2] ones = {1, 1}, int64[1] all = {-1}, int64[2] two = {2, -1}>
            { any = Equal(asked, all)
              sizes = Where(any, ones, asked)
              y = Expand(x, sizes)
              z = Reshape(y, two) }"""
        )
    )
    monkeypatch.setattr(symbolic, "infer_symbolic_shapes", lambda *arguments, **options: pytest.fail("not in order"))
    assert bind_shapes(graph.model, {"x": (3, 1)}).shapes["z"] == (2, 6)


def test_forms_of_old_opsets_without_a_rule_are_observed(write_model: WriteModel) -> None:
    """Slice had its bounds as attributes. They do not depend on data, though its sizes were treated so."""
    facts = inferred(
        write_model(
            """<ir_version: 6, opset_import: ["" : 9]>
            g (float[n, 6, 4] x) => (float[a, b, c] o)
            { y = Slice <axes = [1], starts = [2], ends = [4]> (x)
              z, i = TopK <k = 3> (y)
              o = Relu(z) }"""
        )
    )
    assert [str(size) for size in facts["y"][0]] == ["n", "2", "4"]
    assert [str(size) for size in facts["z"][0]] == ["n", "2", "3"]


def test_axes_that_a_slice_does_not_name_keep_their_sizes(write_model: WriteModel) -> None:
    """All were taken for unknown where its bounds depend on a request."""
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[n, 4, 6] x, int64[1] i, int64[1] j) => (float[n, k, 6] y)
        <int64[1] axes = {-2}>
        { cut = Slice (x, i, j, axes)  y = Relu (cut) }"""
    )
    first, middle, end = inferred(path)["cut"][0]
    assert (str(first), end) == ("n", 6) and middle not in (4, "n")


def test_what_an_expand_can_not_lengthen_keeps_its_size(write_model: WriteModel) -> None:
    """Paddle's exporter bounds the sizes of a class token by 1, before opset 12 in floats."""
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 11]> g (float[n, 5, 8] x) => (float[n, 6, 8] y, float[2, k, m, 8] z)
        <int64[3] ones = {1, 1, 1}, float[3] bounds = {1, 1, 8}, float[2, 1, 1, 8] more = {1, 2, 3, 4, 5, 6, 7, 8,
        1, 2, 3, 4, 5, 6, 7, 8}, float[1, 1, 8] token = {1, 2, 3, 4, 5, 6, 7, 8}, int64[1] zero = {0},
        int64[1] one = {1}, int64[2] rest = {-1, -1}>
        { s = Shape (x)  b = Slice (s, zero, one, zero)  t = Concat <axis = 0> (b, rest)  f = Cast <to = 1> (t)
          u = Max (bounds, f)  e = Cast <to = 7> (u)  a = Expand (token, e)  y = Concat <axis = 1> (a, x)
          z = Expand (more, e) }"""
    )
    graph = read_graph(path)
    infer_shapes(graph.model)
    shapes = {value.name: value.shape for node in graph.nodes for value in node.outputs}
    made, more = shapes["a"], shapes["z"]
    assert made is not None and len(made) == 3 and made[2] == 8
    assert more is not None and len(more) == 4 and (more[0], more[3]) == (2, 8)


def test_products_of_sizes_are_sizes(write_model: WriteModel) -> None:
    """By them tf2onnx joins the axes of each Einsum."""
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, t, 4, 8] x) => (float[r, u, c] y) <int64[2] first = {0, 2}, int64[2] last = {-1, 8}>
        { sizes = Shape(x)  joined = Gather(sizes, first)  rows = ReduceProd(joined)
          shape = Concat <axis = 0> (rows, last)  y = Reshape(x, shape) }"""
    )
    assert [str(size) for size in inferred(path)["y"][0]] == ["4*n", "t", "8"]


def test_the_library_s_own_rules_stay_as_they_are(decoder: Path) -> None:
    model = read_graph(decoder).model
    infer_shapes(model)
    ours = registry.get("", "Slice", 13), registry.get("", "Relu", 14)
    infer_symbolic_shapes(model.clone())
    assert all(rule.__module__.startswith("onnx_shape_inference") for rule in ours if rule is not None)
    assert None not in ours


def test_sizes_that_the_library_writes_and_can_not_read_are_known(
    write_model: WriteModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that rounds up before a Reshape: the library's last step fails on `ceiling`, with all shapes set."""
    path = write_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        pooled (float[batch, 4, length] x) => (float[batch, flat] y)
        <int64[2] shape = {0, -1}>
        { halves = AveragePool <kernel_shape = [2], strides = [2], ceil_mode = 1> (x)  y = Reshape (halves, shape) }
    """)
    monkeypatch.setattr(symbolic, "_infer_in_order", lambda model, *others: symbolic._infer_by_library(model))
    model = read_graph(path).model
    infer_shapes(model)
    assert [str(size) for size in model.graph[0].outputs[0].shape or ()][:2] == ["batch", "4"]


def test_threads_may_infer_models_of_many_versions_at_once() -> None:
    """Each version of an operator that the library lacks gets a rule, in a list that needs a lock."""

    def infer(version: int) -> None:
        model = ir.from_onnx_text(f"""
            <ir_version: 8, opset_import: ["" : 17, "threads.test" : {version}]>
            strange (float[4] x) => (float[4] y) {{ y = threads.test.Strange (x) }}
        """)
        symbolic.infer_shapes_and_types(model)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(infer, range(400, 0, -1)))
    finally:
        sys.setswitchinterval(interval)


def test_a_sequence_that_a_loop_carries_stays_one() -> None:
    """As exporters write it: the body's carried value has no type, and CastLike makes ONNX's inference run first."""

    def tensor(name: str, kind: ir.DataType, *sizes: int) -> ir.Value:
        return ir.Value(name=name, shape=ir.Shape(sizes), type=ir.TensorType(kind))

    x, steps, go = (
        tensor("x", ir.DataType.FLOAT, 2, 4),
        tensor("steps", ir.DataType.INT64),
        tensor("go", ir.DataType.BOOL),
    )
    number, going, so_far = (
        tensor("number", ir.DataType.INT64),
        tensor("going", ir.DataType.BOOL),
        ir.Value(name="so_far"),
    )
    grown = ir.node("SequenceInsert", [so_far, x], outputs=[ir.Value(name="grown")])
    still = ir.node("Identity", [going], outputs=[ir.Value(name="still")])
    body = ir.Graph([number, going, so_far], [*still.outputs, *grown.outputs], nodes=[still, grown], name="body")
    empty = ir.node("SequenceEmpty", [])
    loop = ir.node("Loop", [steps, go, empty.outputs[0]], {"body": body})
    joined = ir.node("ConcatFromSequence", [loop.outputs[0]], {"axis": 0})
    like = ir.node("CastLike", [x, joined.outputs[0]])
    nodes = [empty, loop, joined, like]
    model = ir.Model(
        ir.Graph([x, steps, go], like.outputs, nodes=nodes, opset_imports={"": 18}, name="g"), ir_version=8
    )
    replace_cast_like(model)
    symbolic.infer_shapes_and_types(model)
    carried = [value.type for value in (*empty.outputs, so_far, *grown.outputs, *loop.outputs)]
    assert carried == [ir.SequenceType(ir.TensorType(ir.DataType.FLOAT))] * 4
    assert joined.outputs[0].type == ir.TensorType(ir.DataType.FLOAT)


def test_types_that_are_missing_are_inferred_silently(caplog: pytest.LogCaptureFixture) -> None:
    """The library gives no type to a Reshape by a list of unknown length, but shapes to its consumers."""
    model = ir.from_onnx_text("""
        <ir_version: 8, opset_import: ["" : 17]> g (float[n, 16] x) => (float[m, 8] y)
        <int64[1] zero = {0}, int64[1] four = {4}, int64[1] three = {3}, int64[1] rest = {-1}, int64[2] pair = {-1, 8}>
        { s = Shape (x)  end = Mod (four, three)  head = Slice (s, zero, end)  target = Concat <axis = 0> (head, rest)
          r = Reshape (x, target)  v = Reshape (r, pair)  y = Neg (v) }""")
    symbolic.infer_shapes_and_types(model)
    assert {node.outputs[0].dtype for node in model.graph if node.op_type == "Reshape"} == {ir.DataType.FLOAT}
    assert caplog.records == []


def test_types_of_operators_that_onnx_does_not_know_are_inferred_without_shapes() -> None:
    model = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
        g (float[] x, int64[k] i, uint8[9, 8] t) => (float[] y, float[] z, float[] g, float[] h)
        <float scale = {0.1}, uint16 zero = {7}, uint8 byte = {7}, float[9, 1] scales = {1, 1, 1, 1, 1, 1, 1, 1, 1}>
        { q = com.microsoft.QuantizeLinear (x, scale, zero)
          y = com.microsoft.DequantizeLinear (q, scale, zero)
          p = com.microsoft.QuantizeLinear (x, scale, byte)
          z = com.microsoft.QGemm (p, scale, byte, t, scale, byte)
          j = Unsqueeze (x, i)  k = Cast <to = 7> (j)
          g = com.microsoft.GatherBlockQuantized <block_size = 16> (t, k, scales)
          h = com.microsoft.GatherBlockQuantized <block_size = 16, gather_axis = -1> (t, i, scales) }""")
    symbolic.infer_shapes_and_types(model)
    assert str(model.graph.outputs[3].shape) == "[9,k]"
    types = {value.name: value.dtype for node in model.graph for value in node.outputs}
    floats = dict.fromkeys(("y", "z", "j", "g", "h"), ir.DataType.FLOAT)
    assert types == {"q": ir.DataType.UINT16, "p": ir.DataType.UINT8, "k": ir.DataType.INT64, **floats}


def test_factors_are_cancelled_as_the_library_does() -> None:
    """Two equal element counts relate their symbols. Ours takes a twentieth of the library's time."""
    h, w, c = sympy.symbols("h w c", integer=True, positive=True)
    side = sympy.Max(0, sympy.ceiling(h / 4))
    pairs = (
        (h * w * c, 2 * h * w * sympy.floor(c / 2)),
        (32 * h * side * w, 64 * c * w * h),
        (h + 1, w),
        (6 * h * w, 4 * h),
    )
    for one, other in pairs:
        assert symbolic._without_common_factor(one, other) == _constraints._reduce_common_factor(one, other)


@pytest.mark.parametrize(
    "node",
    [
        "b = Resize <mode = {nearest}> (a, , s)",
        "b = ConvTranspose <auto_pad = {same}, strides = [3, 3]> (a, short)",
    ],
)
def test_images_of_fixed_size_have_the_size_that_kernels_give_them(tmp_path: Path, node: str) -> None:
    """10 x 0.7 in single precision is 7; a kernel of 2 with a stride of 3 ends one place before 30."""
    node = node.format(nearest='"nearest"', same='"SAME_UPPER"')
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> g (float[1, 2, 10, 10] x) => (float[1, 2, m, n] y)
        <float[4] s = {{1, 1, 0.7, 0.7}}> {{ a = Conv (x, first)  {node}  c = Conv (b, wide)  y = Conv (c, last) }}"""
    )
    random, path = np.random.default_rng(0), tmp_path / "model.onnx"
    shapes = {"first": (64, 2, 1, 1), "short": (64, 64, 2, 2), "wide": (256, 64, 1, 1), "last": (2, 256, 1, 1)}
    for name, shape in shapes.items():
        model.graph.initializer.append(numpy_helper.from_array(random.random(shape, np.float32), name))
    onnx.save(model, path)
    compile_model(plan_model(path, ["2xcpu"], Request(split_mode="layer", spread=True)), tmp_path / "package")
    feeds = {"x": random.random((1, 2, 10, 10), np.float32)}
    with Session(tmp_path / "package") as session:
        assert_close(session.run(feeds), run_whole(path, feeds))


@pytest.mark.parametrize("axes", [[2, 3], [-2, -1]])
def test_sizes_that_the_precision_of_a_scale_decides_are_unknown(axes: list[int], write_model: WriteModel) -> None:
    path = write_model(
        f"""<ir_version: 10, opset_import: ["" : 19]> g (float[1, 2, 10, 10] x) => (float[1, 2, m, n] y)
        <float[2] s = {{0.7, 0.7}}> {{ y = Resize <axes = {axes}, mode = "nearest"> (x, , s) }}"""
    )
    model = ir.load(path)
    infer_shapes(model)
    assert not any(isinstance(size, int) for size in list(model.graph.outputs[0].shape or ())[2:])


@pytest.mark.parametrize("step", [1, 2, -1, -2])
def test_sizes_are_sliced_as_onnx_runtime_does(step: int, write_model: WriteModel) -> None:
    """Backwards, and beyond the ends too. The library's rule lost the first of sizes that are turned around."""
    starts, least, greatest = (-5, -3, -1, 0, 1, 2, 5), (-(1 << 63), -(1 << 31)), ((1 << 31) - 1, (1 << 63) - 1)
    bounds = list(product(starts, (*least, -5, -4, -1, 0, 1, 3, 5, *greatest)))
    constants = {value: f"c{number}" for number, value in enumerate({*starts, *(end for _, end in bounds)})}
    given = ", ".join(f"int64[1] {name} = {{{value}}}" for value, name in constants.items())
    slices = [
        f"y{number} = Slice (s, {constants[start]}, {constants[end]}, zero, step)"
        for number, (start, end) in enumerate(bounds)
    ]
    path = write_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, m, 6] x) => ({", ".join(f"int64[k{number}] y{number}" for number in range(len(bounds)))})
        <{given}, int64[1] zero = {{0}}, int64[1] step = {{{step}}}>
        {{ s = Shape (x)  {"  ".join(slices)} }}"""
    )
    facts, sizes = inferred(path), {"n": 5, "m": 7}
    for name, expected in run_whole(path, {"x": np.zeros((5, 7, 6), np.float32)}).items():
        known = json.loads(facts[name][3][SYM_DATA_KEY])
        assert [sizes.get(size, size) for size in known] == expected.tolist(), (name, known)
