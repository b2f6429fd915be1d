"""Small graphs to split: a writer with random weights, and the check that ranks together give the whole's outputs."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
import pytest

from models.writer import Writer, save
from splitc.compiler import Plan, Request, compile_model, plan_model
from splitc.compiler.modes import choosing
from splitc.compiler.modes.asked import analyze_for
from splitc.compiler.modes.row import RowSplit
from splitc.compiler.modes.tensor_split import TensorSplit
from splitc.compiler.packaging import package as packaging
from splitc.compiler.sharding.products import SlicedProducts
from splitc.compiler.sharding.sharded_model import ShardedModel
from splitc.runtime import Session
from splitc.runtime.hardware.devices import parse_devices
from tests.conftest import Arrays, assert_close, run_whole

# From this version on ONNX Runtime runs all graphs of the tests. With an older one some checks are left out.
RUNTIME, COMPLETE = tuple(map(int, ort.__version__.split(".")[:2])), (1, 24)
FLOAT, INT = ir.DataType.FLOAT, ir.DataType.INT64
# Row mode: even and uneven shares. Tensor mode: even ones, and some that leave the first and last rank without units.
EVEN = ((1, 1), (3, 1, 1))
SHARES = ((1, 1), (1, 30, 1))
# Of heads: more even ranks than there are heads of keys, which then share one.
MORE_THAN_HEADS = ((1, 1, 1, 1), (1, 30, 1))


class Block(Writer):
    """A graph of a few nodes, with feeds for its inputs."""

    def __init__(self, opset: int = 17) -> None:
        super().__init__(opset)
        self.feeds: Arrays = {}

    def random(self, name: str, *shape: int) -> npt.NDArray[Any]:
        generator = np.random.default_rng(zlib.crc32(name.encode()))
        size = max(1.0, shape[-2] if len(shape) > 1 else 1)
        return np.asarray(generator.standard_normal(shape, dtype=np.float32) / np.float32(size**0.5))

    def data(self, name: str, shape: Sequence[int], symbols: Sequence[Any] | None = None) -> ir.Value:
        """An input of random numbers. `symbols` is its shape in the model, if sizes are dynamic."""
        self.feeds[name] = self.random(name, *shape)
        return self.input(name, FLOAT, symbols or shape)

    def indices(self, name: str, array: npt.ArrayLike, symbols: Sequence[Any]) -> ir.Value:
        self.feeds[name] = np.asarray(array, np.int64)
        return self.input(name, INT, symbols)

    def w(self, name: str, *shape: int) -> ir.Value:
        """A random weight."""
        return self.weight(name, ir.tensor(self.random(name, *shape)))

    def ints(self, *numbers: int) -> ir.Value:
        return self.constant(list(numbers), np.int64)

    def shape(self, value: ir.Value, axis: int) -> ir.Value:
        """One size of a value, as TorchScript computes it."""
        return self.op(
            "Unsqueeze", self.op("Gather", self.op("Shape", value), self.constant(axis, np.int64), axis=0), self.ints(0)
        )

    def give(self, value: ir.Value, name: str = "y", shape: Sequence[Any] | None = None, dtype: Any = FLOAT) -> None:
        self.output(value, name, dtype, shape or ["?"] * 3)


def sharded(plan: Plan) -> ShardedModel:
    """The sharded model of a plan in tensor mode."""
    assert isinstance(plan.split, TensorSplit)
    return plan.split.sharded


def sliced(plan: Plan) -> SlicedProducts:
    """The sliced products of a plan in row mode."""
    assert isinstance(plan.split, RowSplit)
    return plan.split.sliced


def check_split(
    block: Block,
    folder: Path,
    split: Collection[str],
    shares: Sequence[Sequence[float]] = SHARES,
    whole: Collection[str] = (),
    sums: int | None = None,
    tolerance: float = 2e-5,
) -> list[Plan]:
    """Split a graph in tensor mode with each of the shares: equal outputs, `split` weights split, `whole` ones not."""
    plans = _check(block, folder, split, shares, whole, tolerance, split_mode="tensor")
    for plan in plans:
        assert sums is None or len(sharded(plan).sums.summed) == sums
    return plans


def check_rows(
    block: Block,
    folder: Path,
    split: Collection[str],
    shares: Sequence[Sequence[float]] = EVEN,
    whole: Collection[str] = (),
    rounds: int | None = None,
    tolerance: float = 2e-5,
    least: int = 2,
) -> list[Plan]:
    """As `check_split`, in row mode, for matrices of at least `least` x `least`. There must be so many rounds."""
    plans = _check(block, folder, split, shares, whole, tolerance, split_mode="row", row_min=least)
    for plan in plans:
        assert rounds is None or len(sliced(plan).rounds) == rounds
    return plans


def _check(
    block: Block,
    folder: Path,
    split: Collection[str],
    shares: Sequence[Sequence[float]],
    whole: Collection[str],
    tolerance: float,
    **mode: Any,
) -> list[Plan]:
    model = folder / "block.onnx"
    save(block.model(), model)
    try:
        expected = run_whole(model, block.feeds)
    except Exception as error:
        if RUNTIME >= COMPLETE:
            raise
        pytest.skip(f"ONNX Runtime {RUNTIME} does not run the whole model: {error}")
    shapes = {name: array.shape for name, array in block.feeds.items()}
    plans = []
    for plan in _planned(model, shares, Request(shapes=shapes, memory=["1GiB"], **mode)):
        reports = {weight.name: weight for weight in plan.weights}
        assert {name for name in split if reports[name].reason} == set(), reports
        assert {name for name in whole if not reports[name].reason} == set(), reports
        compile_model(plan, folder / "package", force=True, verify=False)
        with Session(folder / "package", verify="never", threads=1) as session:
            assert_close(session.run(block.feeds), expected, tolerance)
        plans.append(plan)
    return plans


def _planned(model: Path, shares: Sequence[Sequence[float]], request: Request) -> Iterator[Plan]:
    """A plan for each of the shares, all from one analysis, as auto mode makes them.

    Compiling does not load the packages of these plans: the sessions of the tests do. Nor does it look for rows of
    micro-batches, which these sessions do not take.
    """
    analysis = cache(partial(analyze_for, model, parse_devices(["2xcpu"]), request, 1, request.asked_states))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "analyze_for", lambda *_: analysis())
        patch.setattr(packaging, "check_loads", lambda *_: None)
        patch.setattr("splitc.compiler.packaging.manifest_entries.rows_of_micro_batches", lambda analysis: None)
        for share in shares:
            yield plan_model(model, [f"{len(share)}xcpu"], replace(request, tensor_split=share))
