"""If a model is too large to be compared whole, one block of each form is compared at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from models.llama import build
from models.writer import save
from splitc.compiler import Plan, Request, compile_model, plan_model
from splitc.compiler.graphs.lazy_tensors import CutTensor
from splitc.compiler.modes.tensor_split import TensorSplit
from splitc.compiler.packaging import block_check, self_check
from splitc.compiler.packaging.block_check import BlockInputs
from splitc.compiler.sharding import shards
from splitc.runtime.errors import FeedError, OutputsDifferError
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.threads.progress import listening
from tests.conftest import DECODER
from tests.helpers.needs import needs_caches


@pytest.fixture(autouse=True)
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that a block fits, and the model does not."""
    monkeypatch.setattr(self_check, "LARGEST", 1 << 18)


@cache
def plan_of(decoder: Path, mode: str) -> Plan:
    """A plan, for all tests: what they patch is read when a package is written."""
    request = Request(split_mode=mode, memory=["1GiB"])
    return plan_model(decoder, ["2xcpu"], replace(request, row_min=2) if mode == "row" else request)


def said_of(plan: Plan, package: Path) -> tuple[list[str], list[str]]:
    """The messages and warnings of compile."""
    said: list[str] = []
    warnings: list[str] = []
    compile_model(plan, package, say=said.append, warn=warnings.append)
    return [each for each in said if "blocks" in each], warnings


@pytest.mark.parametrize("mode", ["tensor", "row"])
def test_blocks_of_each_form_are_compared(mode: str, decoder: Path, tmp_path: Path) -> None:
    heard: list[tuple[str, float, int]] = []
    with listening(lambda *progress: heard.append(progress)):
        said, warnings = said_of(plan_of(decoder, mode), tmp_path / "package")
    assert len(said) == 1
    (count,) = {total for what, done, total in heard if what == "comparing blocks" and done == total}
    assert f"{count} of its" in said[0]
    assert "of each form, agree with the model's own (largest error" in said[0]
    assert warnings == []


def test_blocks_with_hard_links_to_the_models_data_are_compared(decoder: Path, tmp_path: Path) -> None:
    onnx.save(onnx.load(decoder), tmp_path / "model.onnx", save_as_external_data=True, location="model.data")
    said: list[str] = []
    compile_model(plan_of(tmp_path / "model.onnx", "row"), tmp_path / "package", weights="link", say=said.append)
    assert any("of each form, agree" in each for each in said)
    assert (tmp_path / "model.data").stat().st_nlink > 1


RESIDUAL = """
    n{n} = GroupNormalization <num_groups = 8> (x{n}, scale, shift)  g{n} = Sigmoid (n{n})  s{n} = Mul (n{n}, g{n})
    u{n} = Conv <pads = [1, 1, 1, 1]> (s{n}, up{n}, wide)  m{n} = GroupNormalization <num_groups = 8> (u{n}, wide, wide)
    t{n} = Sigmoid (m{n})  r{n} = Mul (m{n}, t{n})  d{n} = Conv <pads = [1, 1, 1, 1]> (r{n}, down{n})
    x{next} = Add (x{n}, d{n})
"""


def test_blocks_with_operators_of_gpus_are_compared(tmp_path: Path) -> None:
    """They are functions in the package, which one block's graph needs too."""
    body = "".join(RESIDUAL.format(n=number, next=number + 1) for number in range(4))
    head = "m (float16[batch, 32, 8, 8] x0) => (float16[batch, 32, 8, 8] y)"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {head} {{ {body} y = Identity (x4) }}')
    shapes: dict[str, tuple[int, ...]] = {"scale": (32,), "shift": (32,), "wide": (64,)}
    shapes |= {f"up{number}": (64, 32, 3, 3) for number in range(4)}
    shapes |= {f"down{number}": (32, 64, 3, 3) for number in range(4)}
    _add_weights(model, shapes)
    assert b"GroupNorm" in compared_engine(model, tmp_path)


@needs_caches
def test_blocks_of_decoders_read_filled_caches(tmp_path: Path) -> None:
    """On GPUs' operators too, which take several tokens behind a cache in a batch of one row only."""
    save(build(replace(DECODER, layers=4, dtype=ir.DataType.FLOAT16)), tmp_path / "model.onnx")
    plan = plan_model(tmp_path / "model.onnx", "2xcuda", Request(split_mode="tensor", memory=["1GiB"]))
    compile_model(plan, tmp_path / "package", verify=False)
    manifest = read_manifest(tmp_path / "package")
    inputs = BlockInputs(plan, tmp_path / "package", manifest)
    several, one, *_ = inputs.sizes(plan.ranks[0].stage)
    with pytest.raises(FeedError, match="one row only"):
        inputs.make([], several)
    feeds = inputs.make([], one)
    assert feeds["input_ids"].shape == (1, 7)
    assert feeds["past_key_values.0.key"].shape[2] == 3
    (lengths,) = (array for name, array in feeds.items() if name.endswith("lasts"))
    assert lengths.tolist() == [9]  # the place of the last token, as the preamble computes it


def test_sizes_that_make_many_more_elements_than_the_planned_ones_come_last(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {"input_ids": (1, 1), "past_key_values.0.key": (1, 2, 1, 16)}
    plan = plan_model(decoder, "2xcpu", Request(split_mode="tensor", shapes=shapes))
    compile_model(plan, tmp_path / "package", verify=False)
    inputs = BlockInputs(plan, tmp_path / "package", read_manifest(tmp_path / "package"))
    planned = plan.analysis.costs.bound
    assert inputs.sizes(plan.ranks[0].stage)[-1] is planned
    monkeypatch.setattr(block_check, "FEW", 0)
    assert inputs.sizes(plan.ranks[0].stage)[-1] is plan.split.probe_shapes


MLP = """
    n{n} = {norm}  u{n} = MatMul (n{n}, up{n})  r{n} = Relu (u{n})  d{n} = MatMul (r{n}, down{n})
    b{n} = Add (d{n}, bias)  x{next} = Add (x{n}, b{n})
"""


@pytest.mark.parametrize(
    "norm",
    ["LayerNormalization (x{n}, scale, bias)", "LayerNormalization (x{n}, scale)", "RMSNormalization (x{n}, scale)"],
    ids=["LayerNorm", "LayerNorm without a shift", "RMSNorm"],
)
def test_norms_with_additions_are_compared_as_two(norm: str, tmp_path: Path) -> None:
    """The operator of both on GPUs lies in two blocks."""
    body = "".join(MLP.format(n=number, next=number + 1, norm=norm.format(n=number)) for number in range(4))
    head = "m (float16[batch, length, 64] x0) => (float16[batch, length, 64] y)"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 23]> {head} {{ {body} y = Identity (x4) }}')
    shapes: dict[str, tuple[int, ...]] = {"scale": (64,), "bias": (64,)}
    shapes |= {f"up{number}": (64, 512) for number in range(4)} | {f"down{number}": (512, 64) for number in range(4)}
    _add_weights(model, shapes)
    assert b"Skip" in compared_engine(model, tmp_path)


def compared_engine(model: onnx.ModelProto, folder: Path) -> bytes:
    """The second rank's engine of a package for two GPUs, whose blocks agree with the model's."""
    onnx.save(model, folder / "model.onnx")
    plan = plan_model(folder / "model.onnx", ["cuda0", "cuda1"], Request(split_mode="tensor"))
    said, warnings = said_of(plan, folder / "package")
    assert ("of each form, agree with the model's own (largest error" in said[0], warnings) == (True, [])
    return (folder / "package/rank1/stage0.onnx").read_bytes()


def _add_weights(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> None:
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        array = random.standard_normal(shape).astype(np.float16) / np.float16(16)
        model.graph.initializer.append(numpy_helper.from_array(array, name))


def test_blocks_between_segments_too(decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that can't have collectives inside."""
    monkeypatch.setattr("splitc.compiler.lowering.segments.has_collectives", lambda *_: False)
    test_blocks_of_each_form_are_compared("tensor", decoder, tmp_path)


def test_sum_that_the_lowering_forgets_is_found(decoder: Path, tmp_path: Path) -> None:
    plan = plan_of(decoder, "tensor")
    assert isinstance(plan.split, TensorSplit)
    forgetful = replace(plan.split.sharded, sums=replace(plan.split.sharded.sums, summed=()))
    plan = replace(plan, split=replace(plan.split, sharded=forgetful))
    with pytest.raises(OutputsDifferError, match="Nothing was written"):
        compile_model(plan, tmp_path / "package")
    assert not (tmp_path / "package").exists()


def test_shard_of_the_wrong_rows_is_found(decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(tensor: ir.TensorProtocol, places: dict[int, object], shape: ir.Shape, name: str) -> ir.TensorProtocol:
        moved = {
            axis: slice(max(0, each.start - 1), max(0, each.start - 1) + each.stop - each.start)
            if isinstance(each, slice)
            else each
            for axis, each in places.items()
        }
        return CutTensor(tensor, moved, shape, name)  # type: ignore[arg-type]  # as shards are cut

    plan = plan_of.__wrapped__(decoder, "tensor")  # which has cut no weight
    monkeypatch.setattr(shards, "CutTensor", shifted)
    with pytest.raises(OutputsDifferError, match="Nothing was written"):
        compile_model(plan, tmp_path / "package")


def test_blocks_may_be_larger_than_a_model_that_is_compared_whole(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the middle of SDXL's U-Net, which is nearly half of the model."""
    monkeypatch.setattr(self_check, "LARGEST", 1000)
    said, warnings = said_of(plan_of(decoder, "tensor"), tmp_path / "package")
    assert "of each form, agree" in said[0] and "not loaded" not in said[0]
    assert warnings == []


def test_blocks_that_are_too_large_are_named(decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "LARGEST", 1000)
    monkeypatch.setattr(self_check, "BLOCK_SHARE", 1 << 60)
    said, warnings = said_of(plan_of(decoder, "tensor"), tmp_path / "package")
    assert said == []
    assert any("unverified: the model is too large to be compared whole, and no block could be" in w for w in warnings)
    assert any("more than 0.98 KiB is not loaded" in warning for warning in warnings)
