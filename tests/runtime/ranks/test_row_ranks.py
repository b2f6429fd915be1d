"""Row mode with one engine a rank in a session: threads and processes, failing requests, many at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.engines.operator_library import is_built
from splitc.runtime.errors import EngineError
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.package.steps import Run
from tests.conftest import assert_close, run_whole
from tests.helpers.blocks import Block

pytestmark = pytest.mark.skipif(not is_built(), reason="splitc was installed without a C compiler")

WIDE, LAYERS, TABLE = 24, 3, 10


def save_model(folder: Path) -> Path:
    """Layers, the last of which indexes by a feed, after the ranks have communicated a few times."""
    b = Block()
    x = b.data("x", (2, 5, WIDE), ["n", "t", "k"])
    for layer in range(LAYERS):
        few = b.op("Relu", b.op("MatMul", x, b.w(f"few{layer}", WIDE, 3)))
        many = b.op("Relu", b.op("MatMul", x, b.w(f"many{layer}", WIDE, WIDE - 3)))
        x = b.op("Tanh", b.op("MatMul", b.op("Concat", few, many, axis=-1), b.w(f"next{layer}", WIDE, WIDE)))
        if layer == 1:
            ids = b.indices("ids", [[1, 2, 3, 4, 5]] * 2, ["n", "t"])
            x = b.op("Add", x, b.op("Gather", b.w("table", TABLE, WIDE), ids))
    b.give(x)
    save(b.model(), folder / "model.onnx")
    return folder / "model.onnx"


def feeds(length: int, wide: int = WIDE, last: int = 1) -> dict[str, Any]:
    generator = np.random.default_rng(length)
    ids = generator.integers(0, TABLE, (2, length))
    ids[0, -1] = last
    return {"x": generator.standard_normal((2, length, wide)).astype(np.float32), "ids": ids}


def make_package(model: Path, shares: Sequence[float]) -> Path:
    package = model.with_name("package")
    request = Request(split_mode="row", row_min=2, tensor_split=list(shares))
    compile_model(plan_model(model, [f"{len(shares)}xcpu"], request), package, verify=False)
    for rank in read_manifest(package).ranks:
        assert [type(step) for step in rank.program] == [Run]
        assert rank.engines[0].group == list(range(len(shares)))
    return package


# In the third one rank 2 has no column of the narrow products, in the last the main rank has none at all.
SHARES = [(1, 1), (1, 2, 3), (9, 9, 1), (1e-6, 1, 1)]


@pytest.mark.parametrize(("shares", "ranks"), [*((shares, "threads") for shares in SHARES), (SHARES[1], "processes")])
def test_outputs_are_the_models_at_all_lengths(tmp_path: Path, shares: Sequence[float], ranks: str) -> None:
    model = save_model(tmp_path)
    with Session(make_package(model, shares), threads=1, in_flight=3, ranks=ranks) as session:
        # 3000 rows take several packets, and a channel has room for less than that.
        given = [feeds(length) for length in (1, 5, 3000, 1, 2, 900, 4)]
        for each, outputs in zip(given, session.map(given), strict=True):
            assert_close(outputs, run_whole(model, each), 2e-5)


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_request_that_fails_in_the_midst_fails_alone(tmp_path: Path, ranks: str) -> None:
    model = save_model(tmp_path)
    with Session(make_package(model, (1, 1)), threads=1, in_flight=4, ranks=ranks) as session:
        futures = [session.submit(feeds(length, last=TABLE if length % 3 == 2 else 1)) for length in range(1, 13)]
        for length, future in enumerate(futures, 1):
            if length % 3 == 2:
                with pytest.raises(EngineError, match="Gather"):
                    future.result(20)
            else:
                assert_close(future.result(20), run_whole(model, feeds(length)), 2e-5)


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_request_that_fails_on_a_helper_fails_alone(tmp_path: Path, ranks: str) -> None:
    """The main rank multiplies nothing: its helpers detect that shapes do not fit, while it waits for them."""
    model = save_model(tmp_path)
    with Session(make_package(model, (1e-6, 1, 1)), threads=1, in_flight=4, ranks=ranks) as session:
        futures = [session.submit(feeds(length, WIDE + (length == 2))) for length in range(1, 5)]
        for length, future in enumerate(futures, 1):
            if length == 2:
                with pytest.raises(EngineError, match=r"running MatMul node"):
                    future.result(20)
            else:
                assert_close(future.result(20), run_whole(model, feeds(length)), 2e-5)
