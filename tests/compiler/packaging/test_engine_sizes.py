"""Engines that are built for fixed sizes get the sizes that the program passes to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.errors import ModelError
from splitc.compiler.packaging.build_graphs import engine_sizes, prepare_graph
from splitc.runtime import Session
from splitc.runtime.engines.onnxruntime_cpu import OnnxRuntimeEngine
from tests.conftest import Array, decoder_feeds, whole_session

PAST, NEW = 5, 3


def shapes(batch: int = 2, new: int = NEW, past: int = PAST) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in decoder_feeds(batch, new, past).items()}


@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_sizes_are_those_that_engines_see(
    decoder: Path, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_model(decoder, ["3xcpu"], Request(split_mode=mode, shapes=shapes()))
    programs = [plan.program(number) for number in range(len(plan.ranks))]
    expected = engine_sizes(programs, [plan.analysis.shapes] * 3)
    compile_model(plan, tmp_path / "package")

    seen: list[tuple[tuple[str, tuple[int, ...]], ...]] = []
    run = OnnxRuntimeEngine.run

    def watch(self: OnnxRuntimeEngine, values: Mapping[str, ort.OrtValue], into: Mapping[str, Array]) -> object:
        seen.append(tuple(sorted((name, tuple(values[name].shape())) for name in self.inputs)))
        return run(self, values, into)

    monkeypatch.setattr(OnnxRuntimeEngine, "run", watch)
    with Session(tmp_path / "package") as session:
        session.run(decoder_feeds(2, NEW, PAST))
    found = [
        tuple(sorted((name, tuple(sizes.shapes[2])) for name, sizes in engine.items()))
        for rank in expected
        for engine in rank
    ]
    assert sorted(seen) == sorted(found)


def test_range_has_its_ends(decoder: Path) -> None:
    request = Request(
        split_mode="tensor",
        engine="tensorrt-rtx",
        memory=["1GiB"],
        min_shapes=shapes(1, 1, 0),
        opt_shapes=shapes(),
        max_shapes=shapes(4, 8, 64),
    )
    plan = plan_model(decoder, ["2xcuda"], request)
    programs = [plan.program(number) for number in range(2)]
    analysis = plan.analysis
    ranks = engine_sizes(programs, (analysis.smallest, analysis.typical, analysis.shapes))
    hidden = ranks[0][-1]["model.embed"] if "model.embed" in ranks[0][-1] else next(iter(ranks[0][-1].values()))
    assert [each[:2] for each in hidden.shapes] == [[1, 1], [2, NEW], [4, 8]]
    past = next(s for engine in ranks[0] for name, s in engine.items() if name.startswith("past"))
    assert [each[2] for each in past.shapes] == [0, PAST, 64]
    assert {each[1] for each in past.shapes} == {1}, "each rank has one of the two heads of keys and values"


def test_size_that_depends_on_data_is_named(write_model: Callable[[str], Path]) -> None:
    plan = plan_model(write_model(DATA_DEPENDENT), ["2xcpu"], Request(split_mode="layer", spread=True))
    programs = [plan.program(number) for number in range(len(plan.ranks))]
    with pytest.raises(ModelError, match="depends on data"):
        engine_sizes(programs, [plan.analysis.shapes] * 3)


def _weights(rows: int, columns: int) -> str:
    numbers = np.random.default_rng(0).standard_normal(rows * columns)
    return "{" + ", ".join(f"{number:.3f}" for number in numbers) + "}"


DATA_DEPENDENT = f"""
<ir_version: 8, opset_import: ["" : 17]>
model (float[4, 8] x) => (float[n, 8] y)
<float[2, 8] u = {_weights(2, 8)}, float[8, 8] v = {_weights(8, 8)}, float[8, 8] w = {_weights(8, 8)}>
{{
    places = NonZero(x)
    numbers = Cast<to = 1>(places)
    rows = Transpose(numbers)
    a = MatMul(rows, u)
    b = MatMul(a, v)
    c = Relu(b)
    y = MatMul(c, w)
}}
"""


def test_part_of_a_shape_is_sliced_for_parsers_that_give_all_of_it() -> None:
    text = """
    <ir_version: 8, opset_import: ["" : 17]>
    model (float[2, 3, 5] x) => (int64[2] a, int64[1] b, int64[3] c)
    {
        a = Shape<start = 1>(x)
        b = Shape<start = -3, end = -2>(x)
        c = Shape(x)
    }
    """
    model = ir.from_onnx_text(text)
    prepare_graph(model.graph, {}, {})
    assert not [node for node in model.graph if node.op_type == "Shape" and node.attributes]
    session = whole_session(ir.to_proto(model).SerializeToString())
    found = [array.tolist() for array in session.run(None, {"x": np.zeros((2, 3, 5), np.float32)})]
    assert found == [[3, 5], [2], [2, 3, 5]]
