from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from splitc.compiler.analysis.facts import analyze
from splitc.compiler.inference.folding import known_array
from splitc.compiler.inference.shapes import bind_shapes, infer_shapes, symbols_in
from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.request.shapes import AskedShapes
from splitc.compiler.sizes.inputs import input_sizes
from splitc.compiler.states.states import find_states, growing_symbols
from splitc.runtime.errors import MisuseError
from splitc.runtime.feeds.asked_shapes import parse_shapes
from tests.helpers.command import splitc
from tests.helpers.graphs import read_graph

WriteModel = Callable[[str], Path]


def shapes_of(graph: Graph, given: Mapping[str, tuple[int, ...]], past: frozenset[str]) -> dict[str, tuple[int, ...]]:
    """The shapes of the inputs before they are tried."""
    return input_sizes(graph.model, given, past).shapes(graph.model)


def test_shapes_are_read_in_both_spellings() -> None:
    assert parse_shapes(["ids:1x16", "a:b:[2, 3]", "scalar:[]"]) == {"ids": (1, 16), "a:b": (2, 3), "scalar": ()}
    joined = "ids:1x16,mask:[2,3],odd,name:4,scalar:[]"
    assert parse_shapes([joined]) == {"ids": (1, 16), "mask": (2, 3), "odd,name": (4,), "scalar": ()}


@pytest.mark.parametrize("text", ["ids", "ids:axb", ":1x2", "ids:1x-1", "ids:²x4"])
def test_other_shapes_are_refused(text: str) -> None:
    with pytest.raises(MisuseError, match=f"can't read --max-shapes '{text}': write NAME:1x16"):
        parse_shapes([text], "--max-shapes")


@pytest.mark.parametrize("size", [-2, 1 << 50])
def test_sizes_that_none_has(decoder: Path, size: int) -> None:
    """From Python; the command line does not parse them."""
    with pytest.raises(MisuseError, match=f"gives 'input_ids' as 1 x {size}: sizes go from 0 to"):
        shapes_of(read_graph(decoder), {"input_ids": (1, size)}, frozenset())


def test_shape_of_an_input_that_is_not_there(decoder: Path) -> None:
    with pytest.raises(MisuseError, match="names 'idz', and the model has no such input: it has input_ids"):
        shapes_of(read_graph(decoder), {"idz": (1, 2)}, frozenset())


@pytest.mark.parametrize("shape", [(1, 2, 3), (1, 3, 5, 16)])
def test_shape_that_contradicts_the_model(decoder: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(MisuseError, match="the model takes batch x 2 x past x 16"):
        shapes_of(read_graph(decoder), {"past_key_values.0.key": shape}, frozenset())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"input_ids": (2, 3), "position_ids": (4, 3)}, "'batch' is 2 in 'input_ids' and 4 in 'position_ids'"),
        ({"input_ids": (1, 3), "position_ids": (1, 5)}, "'sequence' is 3 in 'input_ids' and 5 in 'position_ids'"),
        ({"past_key_values.0.key": (1, 2, 0, 16), "past_key_values.1.value": (1, 2, 5, 16)}, "'past' is 0 in"),
    ],
)
def test_shapes_that_contradict_each_other(decoder: Path, given: dict[str, tuple[int, ...]], said: str) -> None:
    with pytest.raises(MisuseError, match=f"the shapes contradict: the model's size {said}"):
        shapes_of(read_graph(decoder), given, frozenset({"past"}))


def test_sizes_that_broadcast_do_not_contradict(decoder: Path) -> None:
    """Some exporters give one name to a size and to one that may be 1 instead."""
    for given in ({"input_ids": (1, 3), "position_ids": (4, 3)}, {"input_ids": (4, 3), "position_ids": (1, 3)}):
        shapes = shapes_of(read_graph(decoder), given, frozenset({"past"}))
        assert {name: shapes[name] for name in given} == given
        assert shapes["attention_mask"] == (4, 3)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--shapes", "input_ids:1x4", "--shapes", "input_ids:1x5"),
        ("--set", "input_ids=[[1]]", "--set", "input_ids=[[2]]"),
    ],
)
def test_what_is_said_twice(decoder: Path, arguments: tuple[str, ...]) -> None:
    said = splitc("plan", decoder, "-d", "cpu0", *arguments, code=2).stderr
    assert "'input_ids'" in said
    assert "leave out one of them" in " ".join(said.split())


def test_shapes_given_bind_what_other_inputs_share(decoder: Path) -> None:
    graph = read_graph(decoder)
    infer_shapes(graph.model)
    past = growing_symbols(graph, find_states(graph))
    assert past == {"past"}
    shapes = shapes_of(graph, {"input_ids": (3, 7)}, past)
    assert shapes["position_ids"] == (3, 7)
    assert shapes["attention_mask"] == (3, 7)
    assert shapes["past_key_values.1.value"] == (3, 2, 0, 16)
    shapes = shapes_of(graph, {"input_ids": (3, 7), "past_key_values.0.key": (3, 2, 5, 16)}, past)
    assert shapes["attention_mask"] == (3, 12)


def test_every_value_of_the_decoder_gets_its_shape(decoder: Path) -> None:
    graph = read_graph(decoder)
    infer_shapes(graph.model)
    bound = bind_shapes(graph.model, shapes_of(graph, {"input_ids": (2, 3)}, frozenset({"past"})))
    assert not bound.uncertain
    assert bound.shapes["logits"] == (2, 3, 96)
    assert bound.shapes["present.1.key"] == (2, 2, 3, 16)


def test_shape_arithmetic_is_computed_where_inference_gives_up(write_model: WriteModel) -> None:
    """TorchScript's Expand: a target with -1 for unchanged sizes, and a Where that fills these in."""
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 1] x, int64[n, m] like) => (float[a, b] y)
        <int64[2] target = {-1, 4}, int64[1] two = {2}, int64 minus = {-1}>
        { ones = ConstantOfShape <value = int64[1] {1}> (two)
          wild = Mul(ones, minus)
          same = Equal(target, wild)
          shape = Where(same, ones, target)
          y = Expand(x, shape) }"""
    )
    graph = read_graph(path)
    infer_shapes(graph.model)
    bound = bind_shapes(graph.model, {"x": (3, 1), "like": (3, 2)})
    assert bound.shapes["y"] == (3, 4)


def test_a_division_that_rounds_down_is_shape_arithmetic(write_model: WriteModel) -> None:
    """As torch's exporter writes it: one chunk less if there is a remainder and the signs differ."""
    graph = read_graph(
        write_model(
            """<ir_version: 8, opset_import: ["" : 17]>
            g (float[n] x) => (float[m] y) <int64 four = {4}, int64[1] one = {-1}, float z = {0.0}> {
              s = Shape (x)  n = Squeeze (s)  d = Div (n, four)
              a = Sign (n)  b = Sign (four)  e = Equal (a, b)  unlike = Not (e)
              r = Mod (n, four)  rest = Cast <to = 9> (r)  both = And (unlike, rest)  less = Cast <to = 7> (both)
              m = Sub (d, less)  count = Reshape (m, one)  y = Expand (z, count)
            }"""
        )
    )
    bound = bind_shapes(graph.model, {"x": (11,)})
    assert bound.shapes["y"] == (2,) and not bound.uncertain


def test_powers_and_logarithms_are_shape_arithmetic(write_model: WriteModel) -> None:
    """As vision models compute the side of a square of patches, and how often an axis is halved."""
    model = write_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[1, 64] x) => (float[a, b, c] y)
        <float half = {0.5}, float two = {2.0}, int64[1] zero = {0}, int64 place = {1}> {
            sizes = Shape (x)
            size = Gather (sizes, place)
            real = Cast <to = 1> (size)
            root = Pow (real, half)
            log = Log (real)
            unit = Log (two)
            quotient = Div (log, unit)
            round = Round (quotient)
            side = Cast <to = 7> (root)
            halvings = Cast <to = 7> (round)
            sides = Unsqueeze (side, zero)
            times = Unsqueeze (halvings, zero)
            square = Concat <axis = 0> (sides, sides)
            image = Reshape (x, square)
            several = Concat <axis = 0> (times, sides, sides)
            y = Expand (image, several)
        }"""
    )
    bound = bind_shapes(read_graph(model).model, {"x": (1, 64)})
    assert bound.shapes["y"] == (6, 8, 8) and not bound.uncertain


def test_branch_that_is_not_taken_does_not_matter(write_model: WriteModel) -> None:
    """It squeezes an axis that has one element only when the other branch is taken."""
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 3] x) => (float[k] y)
        <int64 zero = {0}, int64 one = {1}, int64[1] axis = {0}, int64[1] flat = {-1}>
        { s = Shape(x)
          n = Gather(s, zero)
          single = Equal(n, one)
          z = If(single) <
            then_branch = t () => (float[k] u) { u = Squeeze(x, axis) },
            else_branch = e () => (float[k] v) { v = Reshape(x, flat) } >
          y = Neg(z) }"""
    )
    graph = read_graph(path)
    infer_shapes(graph.model)
    assert bind_shapes(graph.model, {"x": (2, 3)}).shapes["y"] == (6,)
    assert bind_shapes(graph.model, {"x": (1, 3)}).shapes["y"] == (3,)


@pytest.mark.parametrize("types", [", int64 n", ""])
def test_constants_of_the_type_of_a_size_depend_on_no_data(write_model: WriteModel, types: str) -> None:
    """torch's exporter writes the arguments of Range so without its optimizer."""
    path = write_model(f"""
        <ir_version: 8, opset_import: ["" : 18]>
        places (float[length, 4] x) => (int64[length] y)
        <int64 zero = {{0}}, int64 one = {{1}}{types}>
        {{ all = Shape <end = 1> (x)  n = Squeeze (all)  from = CastLike (zero, n)  by = CastLike (one, n)
           y = Range (from, n, by) }}
    """)
    graph = read_graph(path)
    infer_shapes(graph.model)
    bound = bind_shapes(graph.model, {"x": (3, 4)})
    assert bound.shapes["y"] == (3,) and not bound.uncertain


def test_what_nobody_reads_makes_no_size_uncertain(write_model: WriteModel) -> None:
    """Exporters name outputs for training, which have no shape rule."""
    path = write_model("""
        <ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1]>
        normed (float[length, 4] x) => (float[length, 4] y, float[length, 4] sum)
        <float[4] scale = {1, 1, 1, 1}>
        { y, mean, deviation, sum = com.microsoft.SkipSimplifiedLayerNormalization (x, x, scale) }
    """)
    graph = read_graph(path)
    infer_shapes(graph.model)
    assert not bind_shapes(graph.model, {"x": (3, 4)}).uncertain


def test_sizes_that_depend_on_data_are_uncertain(write_model: WriteModel) -> None:
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[4] x) => (int64[one, k] y) { i = NonZero(x)
          y = Neg(i) }"""
    )
    graph = read_graph(path)
    infer_shapes(graph.model)
    bound = bind_shapes(graph.model, {"x": (4,)})
    assert bound.uncertain == {"i", "y"}
    assert bound.shapes["y"] == (1, 1)


def test_text_is_no_size(write_model: WriteModel) -> None:
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n] x) => (float[n] y)
        <string[2] words = {"one", "two"}>
        { same = Identity(words)
          many = Size(same)
          number = Cast<to = 1>(many)
          y = Mul(x, number) }"""
    )
    assert known_array(analyze(path, AskedShapes(), 1).graph.graph.initializers["number"]) == 2


@pytest.mark.parametrize("size", ["?", "-1", "3", "batch-size", "a.b.0"])
def test_dimensions_as_exporters_write_them(write_model: WriteModel, size: str) -> None:
    """Paddle writes `?` and -1 for unknown sizes; others write names that look like numbers or expressions."""
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 4] x) => (float[n, 4] y) <float[4, 4] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}> { y = MatMul(x, w) }"""
    )
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        dimension = value.type.tensor_type.shape.dim[0]
        if size == "-1":
            dimension.dim_value = -1
        else:
            dimension.dim_param = size
    onnx.save(model, path)
    analysis = analyze(path, AskedShapes(), 1)
    assert analysis.shapes["x"] == (1, 4)
    assert analyze(path, AskedShapes({"x": (7, 4)}), 1).costs.shapes["y"] == (7, 4)


def test_end_of_a_slice_may_be_any_large_number(write_model: WriteModel) -> None:
    """That end is not a size, nor is arithmetic with it (as tf2onnx writes each Einsum)."""
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 4] x) => (float[m, 4] y)
        <int64[1] zero = {0}, int64[1] far = {1000000000}, int64[1] one = {1}, int64[1] four = {4}>
        { all = Slice(x, zero, far, zero)
          sizes = Shape(all)
          rows = Gather(sizes, zero)
          other = Gather(sizes, one)
          most = Max(rows, one)
          same = Min(other, four)
          target = Concat <axis = 0> (most, same)
          first = Slice(x, zero, one, zero)
          y = Expand(first, target) }"""
    )
    bound = analyze(path, AskedShapes({"x": (3, 4)}), 1).costs.bound
    assert bound.shapes["y"] == (3, 4)
    assert list(bound.constants["target"]) == [3, 4]


def test_size_that_inference_gets_wrong_is_forgotten(write_model: WriteModel) -> None:
    """A slice to the end, written as a large number, which inference takes for the size if it does not know that."""
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 4] x) => (float[m, 4] y)
        <int64[1] zero = {0}, int64[1] far = {900000000}, float[4, 4] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}>
        { p = MatMul(x, w)
          s = Slice(p, zero, far, zero)
          y = MatMul(s, w) }"""
    )
    analysis = analyze(path, AskedShapes({"x": (3, 4)}), 1)
    (sliced,) = (node.outputs[0] for node in analysis.graph.nodes if node.op_type == "Slice")
    assert sliced.shape is not None
    assert 900000000 not in list(sliced.shape)
    assert analysis.costs.shapes["s"] == (3, 4)


@pytest.mark.parametrize(("sizes", "named"), [(("0", "1"), True), (("0", "3"), False)])
def test_dimensions_that_are_called_by_numbers(write_model: WriteModel, sizes: tuple[str, str], named: bool) -> None:
    """They may have any size, unless the model takes no other: torch's exporter names fixed sizes so."""
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, m] x) => (float[n, m] y) <float[3] w = {1, 2, 3}> { y = WORK }""".replace(
            "WORK", "Tanh(x)" if named else "Add(x, w)"
        )
    )
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        for dimension, size in zip(value.type.tensor_type.shape.dim, sizes, strict=True):
            dimension.dim_param = size
    onnx.save(model, path)
    (x,) = analyze(path, AskedShapes(), 1).graph.graph.inputs
    assert [str(size) for size in x.shape or ()] == ([f"size_{size}" for size in sizes] if named else [*sizes])


def test_symbols_of_sizes_that_can_not_be_read() -> None:
    """Inference writes rounded sizes of windows so."""
    texts = ["height - past", "ceiling(height/2)", None]
    assert [symbols_in(ir.SymbolicDim(text)) for text in texts] == [{"height", "past"}, set(), set()]
    assert symbols_in(3) == set()


def test_a_convolution_of_less_data_than_its_kernel_has_no_negative_size(write_model: WriteModel) -> None:
    path = write_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 1, t] x, float[1, 1, 9] w) => (float[n, 1, s] y) { y = Conv(x, w) }"""
    )
    assert analyze(path, AskedShapes({"x": (1, 1, 3)}), 1).costs.shapes["y"] == (1, 1, 0)
