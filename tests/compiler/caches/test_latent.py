"""Attention is computed on the latent that keys and values are projected from, with the same outputs in all modes.

On GPUs its caches are in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from splitc.compiler import Plan, Request, compile_model, plan_model
from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.engine_graphs.cpu_values import why_not_captured
from splitc.runtime import Session
from splitc.runtime.package.manifest_file import read_manifest
from tests.conftest import Arrays, assert_close, run_whole
from tests.helpers.written_attention import operators

WRITTEN = """
    turned = Transpose <perm = [0, 1, 3, 2]> (keys)  factor = Constant <value_float = 0.4> ()
    products = MatMul (queries, turned)  scaled = Mul (products, factor)  {masked}
    weights = Softmax <axis = -1> (scores)  heads = MatMul (weights, values)"""
MASKED = "scores = Add (scaled, mask)"
OPERATOR = "heads = Attention <scale = 0.4> (queries, keys, values, mask)"
MODEL = """<ir_version: 10, opset_import: ["" : 23]>
attend (float[b, n, 16] x, float[b, 1, n, all] mask, float[b, 1, past, 8] latents, float[b, 1, past, 2] places)
    => (float[b, n, 16] y, float[b, 1, all, 8] all_latents, float[b, 1, all, 2] all_places {more}) {{
    by_heads = Constant <value_ints = [0, 0, 4, 6]> ()  projected = MatMul (x, w_query)
    divided = Reshape (projected, by_heads)  whole = Transpose <perm = [0, 2, 1, 3]> (divided)
    query_parts = Constant <value_ints = [4, 2]> ()  first, last = Split <axis = -1> (whole, query_parts)
    rotated = Neg (last)  queries = Concat <axis = -1> (first, rotated)
    one = Constant <value_ints = [1]> ()  narrow = MatMul (x, w_latent)  counts = Constant <value_ints = [8, 2]> ()
    new_latent, new_place = Split <axis = -1> (narrow, counts)
    new_latents = Unsqueeze (new_latent, one)  new_places = Unsqueeze (new_place, one)
    all_latents = Concat <axis = -2> (latents, new_latents)  all_places = Concat <axis = -2> (places, new_places)
    wide = MatMul (all_latents, w_both)  sizes = Constant <value_ints = [0, -1, 4, 10]> ()
    rows = Reshape (wide, sizes)  both = Transpose <perm = [0, 2, 1, 3]> (rows)
    parts = Constant <value_ints = [4, 6]> ()  plain, values = Split <axis = -1> (both, parts)
    repeats = Constant <value_ints = [1, 4, 1, 1]> ()  shared = Expand (all_places, repeats)
    keys = Concat <axis = -1> (plain, shared)
    {attention}
    rows_first = Transpose <perm = [0, 2, 1, 3]> (heads)  flat = Constant <value_ints = [0, 0, 24]> ()
    merged = Reshape (rows_first, flat)  made = MatMul (merged, w_out)  y = Add (made, x)  {extra} }}"""
WHOLE = WRITTEN.format(masked="scores = Identity (scaled)").replace("(queries", "(whole")
FORMS = {
    "written": WRITTEN.format(masked=MASKED),
    "operator": OPERATOR,
    "no mask, queries not joined of parts": WHOLE,
}


def write(
    path: Path, attention: str = FORMS["written"], more: str = "", extra: str = "", by_columns: bool = False
) -> None:
    """The model, whose projection of latents may be stored transposed, as a linear layer of torch is."""
    text = MODEL.format(attention=attention, more=more, extra=extra)
    if by_columns:
        text = text.replace("(all_latents, w_both)", "(all_latents, columns)").replace(
            "wide =", "columns = Transpose (w_both)  wide ="
        )
    model = onnx.parser.parse_model(text)
    random = np.random.default_rng(0)
    both = (40, 8) if by_columns else (8, 40)
    shapes = {"w_query": (16, 24), "w_latent": (16, 10), "w_both": both, "w_out": (24, 16)}
    for name, shape in shapes.items():
        model.graph.initializer.append(numpy_helper.from_array(random.standard_normal(shape, np.float32) / 4, name))
    save(model, path)


def save(model: onnx.ModelProto, path: Path) -> None:
    """Write a model. The mask's columns are those of the past and of the new tokens, which no text can say."""
    model.graph.input[1].type.tensor_type.shape.dim[3].dim_param = "past + n"
    onnx.save(model, path)


def printed(path: Path) -> str:
    model = onnx.load(path)
    model.graph.input[1].type.tensor_type.shape.dim[3].dim_param = "columns"
    return onnx.printer.to_text(model)


def feeds(new: int, past: int, batch: int = 1) -> dict[str, np.ndarray]:
    random = np.random.default_rng(new + past)
    shapes = {"x": (new, 16), "mask": (1, new, past + new), "latents": (1, past, 8), "places": (1, past, 2)}
    return {name: random.standard_normal((batch, *shape)).astype(np.float32) for name, shape in shapes.items()}


def analyzed(path: Path, new: int = 2, past: int = 0) -> Analysis:
    shapes = {name: array.shape for name, array in feeds(new, past).items()}
    return plan_model(path, ["cpu0"], Request(split_mode="layer", shapes=shapes)).analysis


@pytest.mark.parametrize(("form", "by_columns"), [*((form, False) for form in FORMS), ("written", True)])
def test_nothing_is_projected_for_all_tokens(tmp_path: Path, form: str, by_columns: bool) -> None:
    """The projection of all latents is gone. The package agrees with the model after any number of tokens."""
    write(tmp_path / "model.onnx", FORMS[form], by_columns=by_columns)
    analysis = analyzed(tmp_path / "model.onnx")
    assert next(outcome for outcome in analysis.outcomes if outcome.kind == "latent").operator == "FusedMatMul"
    whys = {outcome.why for outcome in analysis.outcomes if outcome.kind == "cache"}
    assert whys == {"engines for CPU devices concatenate caches of latents"}
    assert "w_both" not in analysis.graph.graph.initializers and "Attention" not in operators(analysis.graph.graph)
    compare(tmp_path, "layer", ["cpu0"])


def test_caches_may_have_no_axis_of_heads(tmp_path: Path) -> None:
    """As those of DeepSeek's own code. On GPUs they are concatenated too."""
    write(tmp_path / "model.onnx")
    text = printed(tmp_path / "model.onnx").replace("[b,1,past,", "[b,past,")
    for name in ("latent", "place"):
        text = text.replace(f"new_{name}s = Unsqueeze (new_{name}, one)", f"new_{name}s = Identity (new_{name})")
    text = text.replace("[b,1,all,8]", "[b,all,8]").replace("[b,1,all,2]", "[b,all,2]")
    text = text.replace("Expand (all_places,", "Expand (heads_places,").replace(
        "shared =", "heads_places = Unsqueeze (all_places, one)  shared ="
    )
    save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    shapes = {name: array.shape for name, array in flat(feeds(2, 3)).items()}
    for device, why in (("cpu0", "engines for CPU devices"), ("cuda0", "of four axes each")):
        plan = plan_model(tmp_path / "model.onnx", [device], Request(split_mode="layer", shapes=shapes))
        outcomes = plan.analysis.outcomes
        assert [outcome.operator for outcome in outcomes if outcome.kind == "latent"] == ["FusedMatMul"]
        assert all(why in (outcome.why or "") for outcome in outcomes if outcome.kind == "cache")
    compare(tmp_path, "tensor", ["2xcpu"], shaped=flat)


def flat(fed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Feeds without an axis of heads."""
    return {name: array[:, 0] if name in ("latents", "places") else array for name, array in fed.items()}


def compare(
    folder: Path, mode: str, devices: list[str], shaped: Callable[[Arrays], Arrays] = dict, **options: object
) -> None:
    request = Request(split_mode=mode, spread=True, **options)  # type: ignore[arg-type]
    compile_model(plan_model(folder / "model.onnx", devices, request), folder / "package", verify=False)
    with Session(folder / "package") as session:
        for new, past, batch in ((2, 0, 1), (1, 5, 2), (3, 4, 2)):
            fed = shaped(feeds(new, past, batch))
            fed = {name: array for name, array in fed.items() if name in {value.name for value in session.inputs}}
            assert_close(session.run(fed), run_whole(folder / "model.onnx", fed))


@pytest.mark.parametrize("shares", [None, (1.0, 8.0, 1.0)], ids=["even", "uneven"])
def test_heads_are_sharded(tmp_path: Path, shares: tuple[float, ...] | None) -> None:
    """As in the unfused model: each rank has the weights of its heads."""
    write(tmp_path / "model.onnx")
    compare(tmp_path, "tensor", ["3xcpu"], tensor_split=shares)


OTHERS: dict[str, tuple[dict[str, str], dict[str, int]]] = {
    "have other readers": ({"more": ", float[b, 4, all, 6] z", "extra": "z = Neg (values)"}, {}),
    "takes fewer operations": ({}, {"new": 40}),
}


@pytest.mark.parametrize("why", OTHERS)
def test_what_stays_says_why(tmp_path: Path, why: str) -> None:
    options, sizes = OTHERS[why]
    write(tmp_path / "model.onnx", more=options.get("more", ""), extra=options.get("extra", ""))
    outcome = next(
        outcome for outcome in analyzed(tmp_path / "model.onnx", **sizes).outcomes if outcome.kind == "latent"
    )
    assert outcome.operator is None and why in (outcome.why or "")


def test_a_latent_of_new_tokens_alone_is_projected_once(tmp_path: Path) -> None:
    """There is nothing to project again."""
    write(tmp_path / "model.onnx", WHOLE)
    text = printed(tmp_path / "model.onnx")
    for name in ("latents", "places"):
        text = text.replace(f"Concat <axis: int = -2> ({name}, new_{name})", f"Identity (new_{name})")
    save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    assert "latent" not in {outcome.kind for outcome in analyzed(tmp_path / "model.onnx").outcomes}


# Results in halves.
CLOSE = 2e-2


def in_halves(path: Path) -> None:
    """Make a model of float32 one of float16."""
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    for weight in model.graph.initializer:
        weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight).astype(np.float16), weight.name))
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value_float":
            number = numpy_helper.from_array(np.array(node.attribute[0].f, np.float16))
            node.attribute[0].CopyFrom(onnx.helper.make_attribute("value", number))
    onnx.save(model, path)


def planned_for_gpus(folder: Path, mode: str, devices: list[str], new: int = 2, **options: Any) -> Plan:
    own = {value.name for value in onnx.load(folder / "model.onnx").graph.input}
    shapes = {name: array.shape for name, array in feeds(new, 3).items() if name in own}
    request = Request(split_mode=mode, shapes=shapes, **options)
    return plan_model(folder / "model.onnx", devices, request)


def package_for_gpus(folder: Path, **options: Any) -> Path:
    """A package for two GPUs with its caches in place."""
    plan = planned_for_gpus(folder, "tensor", ["cuda0", "cuda1"], spread=True, **options)
    outcomes = [outcome for outcome in plan.analysis.outcomes if outcome.kind in ("latent", "cache")]
    assert [outcome.why for outcome in outcomes] == [None, None], outcomes
    compile_model(plan, folder / "package", verify=False)
    return folder / "package"


@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
@pytest.mark.parametrize("form", FORMS)
def test_caches_are_in_place_on_gpus(tmp_path: Path, form: str, half: bool) -> None:
    """If the caller feeds the pasts, and in sequences with and without room; also several rows of several tokens."""
    write(tmp_path / "model.onnx", FORMS[form])
    if half:
        in_halves(tmp_path / "model.onnx")
    dtype, close = (np.float16, CLOSE) if half else (np.float32, 1e-4)
    states = {"latents": "all_latents", "places": "all_places"}
    with Session(package_for_gpus(tmp_path), devices=["cpu0", "cpu1"]) as session:
        own = {value.name for value in session.inputs}

        def request(new: int, past: int, batch: int) -> dict[str, np.ndarray]:
            return {name: array.astype(dtype) for name, array in feeds(new, past, batch).items() if name in own}

        for sizes in ((2, 0, 1), (1, 5, 2), (3, 4, 2)):
            fed = request(*sizes)
            assert_close(session.run(fed), run_whole(tmp_path / "model.onnx", fed), close)
        for batch, capacity in ((1, 16), (2, 16), (2, None)):
            with session.start(capacity) as sequence:
                fed, past = request(3, 0, batch), 0
                for new in (1, 2, 1, 1):
                    expected = run_whole(tmp_path / "model.onnx", fed)
                    given = {name: array for name, array in fed.items() if name not in states}
                    assert_close(sequence.run(given), {"y": expected["y"]}, close)
                    past += fed["x"].shape[1]
                    fed = request(new, past, batch) | {name: expected[made] for name, made in states.items()}


def test_engines_see_no_size_that_grows(tmp_path: Path) -> None:
    """With room, each token has the same shapes, and nothing prevents capture as a CUDA graph."""
    write(tmp_path / "model.onnx")
    manifest = read_manifest(package_for_gpus(tmp_path))
    assert manifest.preamble is not None and {"mask", "splitc.past"} <= {*manifest.preamble.consumed}
    for rank in manifest.ranks:
        for engine in rank.engines:
            graph = ir.load(tmp_path / "package" / engine.path).graph
            assert {"mask", "splitc.past"}.isdisjoint(value.name for value in graph.inputs)
            assert not why_not_captured(graph) and engine.branches_by_sizes
    assert not any(length.one_row for length in manifest.lengths)


@pytest.mark.parametrize(("new", "fused"), [(40, True), (3000, False)])
def test_on_gpus_replays_count_for_more_than_operations(tmp_path: Path, new: int, fused: bool) -> None:
    """On CPU devices both stay as they are."""
    write(tmp_path / "model.onnx")
    plan = planned_for_gpus(tmp_path, "layer", ["cuda0"], new=new)
    assert {outcome.operator is not None for outcome in plan.analysis.outcomes if outcome.kind == "latent"} == {fused}


@pytest.mark.parametrize("shares", [(1.0, 3.0), (1.0, 30.0)], ids=str)
def test_ranks_have_uneven_heads_on_gpus(tmp_path: Path, shares: tuple[float, ...]) -> None:
    """Also none."""
    write(tmp_path / "model.onnx")
    with Session(package_for_gpus(tmp_path, tensor_split=shares), devices=["cpu0", "cpu1"]) as session:
        fed = feeds(2, 3, 2)
        assert_close(session.run(fed), run_whole(tmp_path / "model.onnx", fed))


KEPT: dict[str, tuple[str, str]] = {
    "its cache has other readers": ("z = Neg (places)", ", float[b, 1, past, 2] z"),
    "have other readers": ("z = Neg (all_places)", ", float[b, 1, all, 2] z"),
}


@pytest.mark.parametrize("why", KEPT)
def test_caches_that_stay_say_why(tmp_path: Path, why: str) -> None:
    """The attention is computed on the latent all the same, with concatenated caches."""
    extra, more = KEPT[why]
    write(tmp_path / "model.onnx", more=more, extra=extra)
    plan = planned_for_gpus(tmp_path, "layer", ["cuda0"])
    by_kind = {(outcome.kind, outcome.why) for outcome in plan.analysis.outcomes}
    assert ("latent", None) in by_kind
    assert any(kind == "cache" and why in (text or "") for kind, text in by_kind), by_kind
