"""Concatenated caches are written in place, with unchanged results: single requests, sequences, all modes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.analysis.facts import Analysis, analyze
from splitc.compiler.fusion.fuse import Outcome
from splitc.compiler.modes.replanning import plan_from_file
from splitc.compiler.operators.gpu_kernels import HALVES
from splitc.compiler.patterns.kernels import ON_CPUS, ON_GPUS, Gains
from splitc.compiler.planning.plan_file import write_plan
from splitc.compiler.request.shapes import AskedShapes
from splitc.compiler.show.plan_tables import print_explained, print_plan
from splitc.runtime import Session
from splitc.runtime.errors import MisuseError
from splitc.runtime.ranks.computation import Computation
from splitc.runtime.requests.sequence import StateSequence
from tests.conftest import assert_close, run_whole
from tests.helpers.needs import needs_caches
from tests.helpers.written_attention import operators
from tests.helpers.written_decoder import Style, feeds, following, without_states, write

pytestmark = needs_caches
TRANSFORMERS = Style(masked=False, one=True, mask="low", scale="both", turned=True)
OPTIMUM = Style(scale="computed", reads="past")
OPERATOR = Style(operator="concatenated", opset=23)
CAUSAL = Style(operator="past", opset=24, masked=False, attributes=(("is_causal", 1), ("softcap", 1.5)))
CAPPED = replace(OPTIMUM, odd="tanh", scale="both")
STYLES = {
    "transformers": TRANSFORMERS,
    "transformers, several tokens": replace(TRANSFORMERS, one=False, mask="where"),
    "optimum": OPTIMUM,
    "optimum, as many heads": replace(OPTIMUM, groups=1, scale="after"),
    "one head of keys": replace(OPTIMUM, groups=4, scale="both"),
    "a low number": replace(OPTIMUM, mask="low", turned=True),
    "heads by Tile": replace(OPTIMUM, tiled=True),
    "lengths of the mask": replace(OPTIMUM, reads="mask", scale="after", mask="low"),
    "opset 13": replace(OPTIMUM, opset=13),
    "blank rows": replace(TRANSFORMERS, masked=True, one=False, blanks=True),
    "sinks": replace(TRANSFORMERS, one=False, scale="after", sinks=True),
    "operator": OPERATOR,
    "operator, as many heads": replace(OPERATOR, groups=1, attributes=(("scale", 0.2), ("softcap", 2.0))),
    "operator with the past": replace(OPERATOR, operator="past"),
    "operator that hides later tokens": CAUSAL,
    "operator of three axes": replace(OPERATOR, operator="flat", groups=4, reads="mask"),
    "operator of three axes that hides later tokens": replace(CAUSAL, operator="flat"),
    "MultiHeadAttention": replace(OPTIMUM, operator="fused"),
    "MultiHeadAttention with the past": replace(OPTIMUM, operator="fused past", groups=1, attributes=(("scale", 0.2),)),
}
# What layers share is the same in most styles: these have two, the others one.
DEEP = ("transformers", "optimum", "lengths of the mask", "blank rows", "operator", "operator that hides later tokens")
STYLES = {name: style if name in DEEP else replace(style, layers=1) for name, style in STYLES.items()}


def analyzed(style: Style, folder: Path, batch: int = 1, new: int = 1, past: int = 5) -> Analysis:
    path = folder / "model.onnx"
    onnx.save(write(style), path)
    shapes = {name: array.shape for name, array in feeds(style, batch, new, past).items()}
    return analyze(path, AskedShapes(shapes), 1, gains=ON_CPUS)


def fused_caches(analysis: Analysis) -> list[str | None]:
    """The operators of all attentions and caches."""
    return [outcome.operator for outcome in analysis.outcomes if outcome.kind != "rows"]


# Packages that several tests use, with the analyses of their models.
_made: dict[object, tuple[Path, Analysis]] = {}


def package(style: Style, folder: Path, mode: str = "layer", devices: str = "cpu0", **options: object) -> Path:
    """A package of the style's model, which is written to the folder."""
    return package_and_analysis(style, folder, mode, devices, **options)[0]


def package_and_analysis(
    style: Style, folder: Path, mode: str, devices: str, **options: object
) -> tuple[Path, Analysis]:
    onnx.save(write(style), folder / "model.onnx")
    key = (style, mode, devices, *options.items())
    if key not in _made:
        _made[key] = _compile(folder, style, mode, devices, options)
    return _made[key]


def _compile(
    folder: Path, style: Style, mode: str, devices: str, options: Mapping[str, object]
) -> tuple[Path, Analysis]:
    request = Request(split_mode=mode, spread=True, **options)  # type: ignore[arg-type]
    plan = plan_model(folder / "model.onnx", [devices], request)
    assert fused_caches(plan.analysis) == ["GroupQueryAttention"] * style.layers
    compile_model(plan, folder / "package", verify=False)
    return folder / "package", plan.analysis


def assert_right(
    session: Session, sequence: StateSequence, style: Style, folder: Path, tolerance: float = 1e-5
) -> None:
    """Compare requests, and a sequence of the same tokens, with the unsplit model in the folder."""
    request = feeds(style, 2, 3, 0)
    for new in (1, 2, 1):
        expected = run_whole(folder / "model.onnx", request)
        assert_close(session.run(request), expected, tolerance)
        assert_close(sequence.run(without_states(request)), {"logits": expected["logits"]}, tolerance)
        request = following(style, expected, 2, new)


def assert_in_place(made: Analysis, style: Style, model: Path) -> None:
    """No node reads the cache's own length any more. Its input and output keep their names and shapes."""
    names = operators(made.graph.graph)
    assert names.count("com.microsoft.GroupQueryAttention") == style.layers and "Softmax" not in names
    assert [outcome.kind for outcome in made.outcomes if outcome.kind != "rows"] == ["cache"] * style.layers
    assert made.states and all(state.in_place and state.grows == 2 for state in made.states)
    (length,) = made.lengths
    assert sorted(length.states) == sorted(state.input for state in made.states)
    assert (length.adds, length.reads) == ((1, None) if style.one else (0, ("input_ids", 1)))
    own = onnx.load(model).graph
    inputs = [value for value in made.graph.graph.inputs if value.name not in made.added]
    declared = {} if made.chosen is None else made.chosen.declared
    for values, kept in ((inputs, own.input), (made.graph.graph.outputs, own.output)):
        known = {value.name: declared.get(value.name or "", value.shape) for value in values}
        shapes = {
            name: [str(n) if isinstance(n, int) else n.value for n in shape or ()] for name, shape in known.items()
        }
        assert shapes == {
            value.name: [d.dim_param or str(d.dim_value) for d in value.type.tensor_type.shape.dim] for value in kept
        }


@pytest.mark.parametrize(("name", "mode"), [*((name, "tensor") for name in STYLES), ("optimum", "layer")])
def test_every_style_is_in_place_and_gives_what_the_model_gives(tmp_path: Path, name: str, mode: str) -> None:
    """If the caller feeds the pasts, with padding in front, and with several tokens after a prefix in several rows."""
    style = STYLES[name]
    path, made = package_and_analysis(style, tmp_path, mode, "2xcpu")
    assert_in_place(made, style, tmp_path / "model.onnx")
    with Session(path) as session:
        assert [tensor.name for tensor in session.inputs] == [*feeds(style, 1, 1, 1)]
        for number, (batch, new, past, padded) in enumerate(
            [(1, 1, 5, 0), (2, 1, 9, 4), (3, 7, 0, 2), (1, 3, 8, 2), (2, 4, 6, 3)]
        ):
            request = feeds(style, batch, 1 if style.one else new, past, padded, number)
            assert_close(session.run(request), run_whole(tmp_path / "model.onnx", request), 1e-5)


def test_several_rows_in_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment with an attention takes the caches' length, though an earlier one has computed what it says."""
    monkeypatch.setattr("splitc.compiler.lowering.segments.has_collectives", lambda *_: False)
    onnx.save(write(OPTIMUM), tmp_path / "model.onnx")
    with Session(_compile(tmp_path, OPTIMUM, "tensor", "2xcpu", {})[0]) as session:
        assert len(session.manifest.ranks[0].engines) > 1
        request = feeds(OPTIMUM, 2, 4, 6, padded=3)
        assert_close(session.run(request), run_whole(tmp_path / "model.onnx", request), 1e-5)


@pytest.mark.parametrize(
    ("name", "capacity"),
    [
        ("transformers", 24),
        ("optimum", None),
        ("optimum", 40),
        ("a low number", 24),
        ("sinks", 24),
        ("lengths of the mask", None),
        ("operator", 24),
        ("operator that hides later tokens", None),
        ("operator of three axes", 40),
    ],
)
def test_sequences_give_the_tokens_of_the_unsplit_model(tmp_path: Path, name: str, capacity: int | None) -> None:
    """With and without room, in one row and in several, one token and several at a time."""
    style = STYLES[name]
    path = package(style, tmp_path, "tensor", "2xcpu")
    with Session(path) as session:
        for batch, steps in ((1, (5, 1, 1, 3)), (3, (6, 1, 4, 1))):
            with session.start(capacity) as sequence:
                request = feeds(style, batch, 1 if style.one else steps[0], 0, padded=2)
                for new in (*steps[1:], 1):
                    expected = run_whole(tmp_path / "model.onnx", request)
                    actual = sequence.run(without_states(request))
                    assert_close(actual, {"logits": expected["logits"]}, 1e-5)
                    request = following(style, expected, batch, 1 if style.one else new, padded=2)


def test_ranks_that_are_processes_are_told_the_length_too(tmp_path: Path) -> None:
    path = package(OPTIMUM, tmp_path, "layer", "2xcpu")
    with Session(path, ranks="processes") as session, session.start(16) as sequence:
        assert_right(session, sequence, OPTIMUM, tmp_path)


def test_states_are_written_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a capacity, the cache keeps its memory after each token; without it, each token allocates a new cache."""
    path = package(TRANSFORMERS, tmp_path)
    places: list[set[int]] = []
    known = Computation.run

    def watch(self: Computation, request: object) -> object:
        result = known(self, request)  # type: ignore[arg-type]
        places.append({value.data_ptr() for held in self.sequences.values() for value in held.values()})
        return result

    monkeypatch.setattr(Computation, "run", watch)
    with Session(path) as session:
        for capacity in (32, None):
            places.clear()
            with session.start(capacity) as sequence:
                for past in range(4):
                    sequence.run(without_states(feeds(TRANSFORMERS, 1, 1, past)))
            same = all(before == after for before, after in pairwise(places))
            assert same == (capacity is not None)


def test_room_ends_in_words_and_grows(tmp_path: Path) -> None:
    path = package(OPTIMUM, tmp_path)
    with Session(path) as session, session.start(6) as sequence:
        request = feeds(OPTIMUM, 1, 5, 0)
        sequence.run(without_states(request))
        after = following(OPTIMUM, run_whole(tmp_path / "model.onnx", request), 1, 2)
        with pytest.raises(MisuseError, match="room for 6 tokens, and comes to 7"):
            sequence.run(without_states(after))
        sequence.grow(9)
        expected = run_whole(tmp_path / "model.onnx", after)["logits"]
        assert_close(sequence.run(without_states(after)), {"logits": expected})


@pytest.mark.parametrize(("capacity", "batch"), [(None, 2), (12, 1)])
def test_states_that_are_loaded_get_room(tmp_path: Path, capacity: int | None, batch: int) -> None:
    path = package(OPTIMUM, tmp_path, "tensor", "2xcpu")
    with Session(path) as session, session.start(capacity) as sequence:
        request = feeds(OPTIMUM, batch, 2, 7)
        sequence.load({name: array for name, array in request.items() if name.startswith("past_")})
        expected = run_whole(tmp_path / "model.onnx", request)
        assert_close(sequence.run(without_states(request)), {"logits": expected["logits"]})
        after = following(OPTIMUM, expected, batch, 1)
        expected = run_whole(tmp_path / "model.onnx", after)
        assert_close(sequence.run(without_states(after)), {"logits": expected["logits"]})
    with (
        Session(path) as session,
        session.start(6) as sequence,
        pytest.raises(MisuseError, match=r"7 tokens, and .* 6"),
    ):
        sequence.load({name: array for name, array in request.items() if name.startswith("past_")})


ODD = {
    "new rows are not concatenated with it as it is, along the third of four axes": replace(OPTIMUM, odd="beams"),
    "no attention reads it as keys or values": replace(OPTIMUM, odd="parts"),
    "its cache has other readers": replace(OPTIMUM, odd="values", layers=1),
    "its scores or weights have other readers": replace(OPTIMUM, odd="summed"),
    "no fused kernel is faster for its type, FLOAT16": replace(OPTIMUM, dtype=TensorProto.FLOAT16),
    "no kernel is faster with a softcap (Tanh)": CAPPED,
    "its output qk_matmul_output has readers": replace(OPERATOR, operator="past", odd="scores"),
    "it is causal without a cache, and has more or fewer queries than keys": replace(CAUSAL, operator="concatenated"),
    "the operator takes head sizes that are multiples of 8, the same of keys and values": replace(OPTIMUM, size=12),
}


@pytest.mark.parametrize(("why", "style"), ODD.items(), ids=ODD)
def test_what_stays_says_why(tmp_path: Path, why: str, style: Style, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(write(style), tmp_path / "model.onnx")
    shapes = {name: array.shape for name, array in feeds(style, 1, 1, 5).items()}
    plan = plan_model(tmp_path / "model.onnx", ["cpu0"], Request(split_mode="layer", shapes=shapes))
    made = plan.analysis
    assert {(outcome.operator, outcome.why) for outcome in made.outcomes if outcome.kind == "cache"} == {(None, why)}
    assert made.lengths == () and not any(state.in_place for state in made.states)
    assert "splitc.past" not in [value.name for value in made.graph.graph.inputs]
    print_explained(plan)
    print_plan(plan)
    said = " ".join(capsys.readouterr().out.split())
    assert "caches in place: 0 of" in said and f"not: {why}" in said


def test_cache_of_attention_that_has_no_operator_stays(tmp_path: Path) -> None:
    made = analyzed(replace(OPTIMUM, odd="sinks"), tmp_path)
    assert {(outcome.kind, outcome.operator, outcome.why) for outcome in made.outcomes if outcome.kind != "rows"} == {
        ("attention", None, "a Slice is between its Softmax and the product with the values"),
        ("cache", None, "no attention reads it as keys or values"),
    }


def test_a_cache_of_two_layers_stays(tmp_path: Path) -> None:
    """It would have to be written once and read twice. The second layer's own cache has no reader."""
    made = analyzed(replace(OPTIMUM, odd="shared"), tmp_path)
    caches = [(outcome.operator, outcome.why) for outcome in made.outcomes if outcome.kind == "cache"]
    assert caches == [(None, "its cache has other readers")] * 2
    assert made.lengths == ()


def test_planned_requests_that_would_be_slower_stay(tmp_path: Path) -> None:
    (outcome, *_) = analyzed(OPTIMUM, tmp_path, 2, 3, 5).outcomes
    assert outcome.operator is None and outcome.why is not None
    assert outcome.why.endswith(": 2 rows of 3 tokens after 5 are planned")
    for sizes in ((1, 3, 5), (2, 1, 5), (2, 3, 0)):
        assert analyzed(OPTIMUM, tmp_path, *sizes).lengths


def test_sums_that_are_a_planned_size_by_chance_are_no_numbers(tmp_path: Path) -> None:
    """If probed lengths or their sums equal planned sizes by chance, other lengths are probed."""
    for new in range(9, 40, 3):
        made = analyzed(replace(OPTIMUM, layers=1), tmp_path, 1, new, 0)
        assert made.lengths, new
        constants = [value.const_value.numpy() for value in made.graph.graph.initializers.values() if value.const_value]
        assert not any(array.dtype == np.int64 and array.size == 1 and array.item() == new for array in constants), new


def test_no_fuse_and_other_types_leave_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(write(OPTIMUM), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["cpu0"], Request(split_mode="layer", no_fuse=True))
    assert plan.analysis.outcomes == () and plan.analysis.lengths == ()
    shapes = {name: array.shape for name, array in feeds(OPTIMUM, 1, 1, 5).items()}
    made = analyze(tmp_path / "model.onnx", AskedShapes(shapes), 1, gains=replace(ON_GPUS, caches=HALVES))
    assert made.lengths == () and {outcome.kind for outcome in made.outcomes} == {"attention", "cache", "rows"}
    assert not any(fused_caches(made))
    types = frozenset({ir.DataType.FLOAT})
    made = analyze(tmp_path / "model.onnx", AskedShapes(shapes), 1, gains=Gains(caches=types))
    caches = tuple(outcome for outcome in made.outcomes if outcome.kind != "rows")
    assert caches == tuple(Outcome(outcome.place, "GroupQueryAttention", None, "cache") for outcome in caches)


def test_what_a_plan_leaves_to_the_caller_is_not_in_place(tmp_path: Path) -> None:
    onnx.save(write(OPTIMUM), tmp_path / "model.onnx")
    write_plan(plan_model(tmp_path / "model.onnx", ["cpu0"], Request(no_state=True)), tmp_path / "plan.json")
    again = plan_from_file(tmp_path / "model.onnx", tmp_path / "plan.json")
    assert again.analysis.states == () and again.analysis.lengths == ()


def test_planned_memory_has_pasts_that_are_fed(tmp_path: Path) -> None:
    """It counts both arrays of a cache, as for a concatenated one."""
    onnx.save(write(OPTIMUM), tmp_path / "model.onnx")
    shapes = {name: array.shape for name, array in feeds(OPTIMUM, 1, 1, 40).items()}
    plans = [
        plan_model(tmp_path / "model.onnx", ["cpu0"], Request(split_mode="layer", no_fuse=no_fuse, shapes=shapes))
        for no_fuse in (False, True)
    ]
    assert plans[0].analysis.lengths and not plans[1].analysis.lengths
    assert plans[0].ranks[0].memory.cache == plans[1].ranks[0].memory.cache > 0


@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_half_precision_is_right_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """On CPUs, with gains as on a GPU."""
    gains = replace(ON_CPUS, caches=frozenset({ir.DataType.FLOAT16}))
    monkeypatch.setattr("splitc.compiler.modes.asked.gains_of", lambda engine, devices: gains)
    style = replace(OPTIMUM, dtype=TensorProto.FLOAT16)
    with Session(package(style, tmp_path, mode, "2xcpu")) as session, session.start(16) as sequence:
        assert_right(session, sequence, style, tmp_path, 4e-3)


def test_capped_scores_are_right_where_a_kernel_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs, with gains as on a GPU."""
    gains = replace(ON_CPUS, capped=True)
    monkeypatch.setattr("splitc.compiler.modes.asked.gains_of", lambda engine, devices: gains)
    with Session(package(CAPPED, tmp_path, "tensor", "2xcpu")) as session, session.start(16) as sequence:
        assert_right(session, sequence, CAPPED, tmp_path, 1e-5)


def test_a_plan_that_was_written_is_planned_again(tmp_path: Path) -> None:
    onnx.save(write(OPTIMUM), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode="layer", spread=True))
    write_plan(plan, tmp_path / "plan.json")
    assert "splitc.past" not in (tmp_path / "plan.json").read_text()
    again = plan_from_file(tmp_path / "model.onnx", tmp_path / "plan.json")
    assert again.analysis.lengths == plan.analysis.lengths and again.analysis.states == plan.analysis.states
    compile_model(again, tmp_path / "package", verify=False)
    request = feeds(OPTIMUM, 2, 3, 4)
    with Session(tmp_path / "package") as session:
        assert_close(session.run(request), run_whole(tmp_path / "model.onnx", request))


def test_generate_uses_the_room(tmp_path: Path) -> None:
    """It generates the same tokens as the unsplit model in a plain loop."""
    for name in ("transformers", "optimum"):
        folder = tmp_path / name
        folder.mkdir()
        style = STYLES[name]
        path = package(style, folder)
        prompt, expected = [3, 1, 4, 1, 5], list[int]()
        outputs = {
            f"present_{kind}.{n}": np.zeros((1, style.kv_heads, 0, style.size), np.float32)
            for n in range(style.layers)
            for kind in ("key", "value")
        }
        rows = [[token] for token in prompt] if style.one else [prompt]
        while len(expected) < 12:
            new = rows.pop(0) if rows else [expected[-1]]
            request = {**following(style, outputs, 1, len(new)), "input_ids": np.array([new])}
            outputs = run_whole(folder / "model.onnx", request)
            if not rows:
                expected.append(int(outputs["logits"][0, -1].argmax()))
        with Session(path) as session:
            assert list(session.generate(prompt, max_new_tokens=12)) == expected


def test_a_fixed_number_of_tokens_after_others(tmp_path: Path) -> None:
    """Several rows of a batch feed earlier rows again, so that their number with the new ones is not fixed."""
    style = STYLES["transformers, several tokens"]
    model = write(style)
    for value in model.graph.input:
        if value.name in ("input_ids", "position_ids"):
            value.type.tensor_type.shape.dim[1].dim_value = 3
    onnx.save(model, tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", ["2xcpu"], Request(split_mode="tensor"))
    assert fused_caches(plan.analysis) == ["GroupQueryAttention"] * style.layers
    compile_model(plan, tmp_path / "package", verify=False)
    with Session(tmp_path / "package") as session:
        for batch, past in ((1, 0), (2, 0), (2, 5)):
            request = feeds(style, batch, 3, past)
            assert_close(session.run(request), run_whole(tmp_path / "model.onnx", request), 1e-5)
