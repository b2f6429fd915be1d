"""Random graphs of any operators in random shares agree with the unsplit model, and never end in a traceback."""

from __future__ import annotations

import random
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.errors import CannotSplitError
from splitc.runtime import Session
from tests.conftest import assert_close
from tests.helpers.fuzz import seeds
from tests.helpers.schema_graphs import random_graph

SHARES = [(1, 1), (3, 1), (1, 1, 1), (20, 1, 1), (1, 8, 1), (7, 2, 4)]


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", seeds(12))
def test_random_graph(seed: int, tmp_path: Path) -> None:
    model, feeds = random_graph(seed)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    try:
        whole = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:
        pytest.skip(f"ONNX Runtime does not load it: {error}")
    names = [value.name for value in whole.get_outputs()]
    expected = dict(zip(names, whole.run(names, feeds), strict=True))
    share = random.Random(seed).choice(SHARES)
    shapes = {value.name: feeds[value.name].shape for value in whole.get_inputs()}
    request = Request(split_mode="tensor", shapes=shapes, tensor_split=share, memory=["1GiB"])
    try:
        plan = plan_model(path, [f"{len(share)}xcpu"], request)
    except CannotSplitError:
        pytest.skip("nothing can be split")
    assert not any("did not hold" in warning for warning in plan.warnings), plan.warnings
    compile_model(plan, tmp_path / "package", verify=False)
    with Session(tmp_path / "package", verify="never") as session:
        assert_close(session.run(feeds), expected, 1e-4)
