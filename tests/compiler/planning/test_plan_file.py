"""plan.json: written, edited by hand, read back, and refused if it contradicts the model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.llama import Size, build
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.modes.replanning import plan_from_file
from splitc.compiler.planning.plan_file import write_plan
from splitc.runtime import DoesNotFitError, MisuseError, Session, SplitcError
from splitc.runtime.hardware.devices import parse_devices
from tests.conftest import LAYER, assert_close, decoder_feeds, run_whole
from tests.helpers.fuzz import damage_json, seeds
from tests.helpers.needs import needs_caches


@pytest.fixture(scope="module")
def written(decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A plan's file."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    write_plan(plan_model(decoder, parse_devices(["3xcpu"]), LAYER), path)
    return path.read_bytes()


@pytest.fixture
def plan_path(written: bytes, tmp_path: Path) -> Path:
    """The plan's file, in a folder where it may be edited."""
    (tmp_path / "plan.json").write_bytes(written)
    return tmp_path / "plan.json"


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def swap_stages(plan: dict[str, Any]) -> None:
    first, second, _ = plan["ranks"]
    first["stage"], second["stage"] = second["stage"], first["stage"]


def test_plan_comes_back_as_it_was(decoder: Path, plan_path: Path) -> None:
    before = plan_path.read_bytes()
    write_plan(plan_from_file(decoder, plan_path), plan_path)
    assert plan_path.read_bytes() == before


def test_packages_from_one_plan_are_the_same_to_the_byte(decoder: Path, plan_path: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        compile_model(plan_from_file(decoder, plan_path), tmp_path / name)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(tmp_path / "b") for path in (tmp_path / "b").rglob("*") if path.is_file())
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_moving_a_block_is_a_one_line_edit(decoder: Path, plan_path: Path, tmp_path: Path) -> None:
    text = plan_path.read_text()
    assert text.count('"layers.1": 1') == 1
    plan_path.write_text(text.replace('"layers.1": 1', '"layers.1": 0'))
    plan = plan_from_file(decoder, plan_path)
    assert [block.name for block in plan.ranks[0].stage.blocks] == ["prologue", "layers.0", "layers.1"]
    compile_model(plan, tmp_path / "package", verify=False)
    feeds = decoder_feeds()
    with Session(tmp_path / "package") as session:
        assert_close(session.run(feeds), run_whole(decoder, feeds))


def test_emptied_rank_is_left_out(decoder: Path, plan_path: Path) -> None:
    edit(plan_path, lambda plan: plan["blocks"].update({"layers.1": 0}))
    assert [str(rank.device) for rank in plan_from_file(decoder, plan_path).ranks] == ["cpu0", "cpu2"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda plan: plan["blocks"].update({"layers.9": 1}),
            'the line "layers.9: 1", and the model has no such block',
        ),
        (lambda plan: plan["blocks"].pop("layers.1"), "leaves out the block layers.1"),
        (lambda plan: plan["blocks"].update({"layers.0": 2}), 'the line "layers.1: 1" after a block in stage 2'),
        (lambda plan: plan["blocks"].update({"layers.0": 7}), 'the line "layers.0: 7", and it has stages 0 to 2'),
        (lambda plan: plan["blocks"].update({"layers.0": "x"}), "is no plan: Expected `int`"),
        (lambda plan: plan["shapes"].update({"input_ids": [1, -1]}), r'the line "input_ids: \[1, -1\]" under "shapes"'),
        (
            lambda plan: plan["shapes"].update({"input_ids": [0, 16]}),
            r'"input_ids: \[0, 16\]" under "shapes": there',
        ),
        (lambda plan: plan["shapes"].pop("input_ids"), "leaves out the input input_ids"),
        (lambda plan: plan["ranks"][1].update({"share": math.nan}), r'the line "share: nan" of rank 1 \(cpu1\)'),
        (lambda plan: plan["ranks"][1].update({"share": math.inf}), r'the line "share: inf" of rank 1 \(cpu1\)'),
        (lambda plan: plan["ranks"][1].update({"share": -1}), r'the line "share: -1.0" of rank 1 \(cpu1\)'),
        (lambda plan: plan["ranks"][1].update({"device": "CPU:0"}), 'the line "device: cpu0" for the ranks 0 and 1'),
        (swap_stages, r'the line "stage: 1" of rank 0 \(cpu0\), which is 0: in layer mode each rank is a stage'),
        (lambda plan: plan["ranks"][1].update({"stage": 9}), r'the line "stage: 9" of rank 1 \(cpu1\): stages are num'),
        (
            lambda plan: plan.update({"objective": "speed"}),
            'the line "objective: speed": there are throughput, latency',
        ),
        (lambda plan: plan.update({"row_min": 0}), 'the line "row_min: 0": the least side of a matrix is 1'),
        (lambda plan: plan["states"][0].update({"grows": 99}), "which grows along axis 99: it has the axes 0 to 3"),
        (lambda plan: plan["source"].update({"sha256": "0" * 64}), "was made for another model"),
        (lambda plan: plan.update({"schema": 7}), "schema version 7, and this splitc reads version 2"),
        (lambda plan: plan["ranks"][0].update({"device": "gpu0"}), "unknown device 'gpu0'"),
        (lambda plan: plan.update({"splitmode": "layer"}), "is no plan: Object contains unknown field `splitmode`"),
    ],
)
def test_plan_that_contradicts_the_model_is_refused(
    decoder: Path, plan_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    edit(plan_path, change)
    with pytest.raises(MisuseError, match=message):
        plan_from_file(decoder, plan_path)


def test_block_that_stands_twice_is_refused(decoder: Path, plan_path: Path) -> None:
    plan_path.write_text(plan_path.read_text().replace('"layers.1": 1', '"layers.1": 1, "layers.1": 2'))
    with pytest.raises(MisuseError, match=r'has the line "layers\.1: 2" twice'):
        plan_from_file(decoder, plan_path)


def test_other_model_of_the_same_shape_is_refused(plan_path: Path, tmp_path: Path) -> None:
    save(
        build(Size(layers=2, hidden=64, heads=4, kv_heads=4, feed_forward=160, vocabulary=96)), tmp_path / "other.onnx"
    )
    with pytest.raises(MisuseError, match="was made for another model"):
        plan_from_file(tmp_path / "other.onnx", plan_path)


def test_edit_that_does_not_fit_is_refused_with_the_numbers(decoder: Path, plan_path: Path) -> None:
    edit(plan_path, lambda plan: plan["ranks"][1].update({"budget_bytes": 1000}))
    with pytest.raises(DoesNotFitError, match=r"puts layers\.1 to layers\.1 on cpu1, which needs .* may use 0\.98 KiB"):
        plan_from_file(decoder, plan_path)


@pytest.mark.parametrize("content", ["", "[]", "{", "\x00"])
def test_other_files_are_no_plan(decoder: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(MisuseError, match="is no plan"):
        plan_from_file(decoder, tmp_path / "plan.json")
    with pytest.raises(MisuseError, match="no such plan"):
        plan_from_file(decoder, tmp_path / "none.json")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no /dev/zero")
def test_device_is_no_plan(decoder: Path) -> None:
    """And it is not read to its end."""
    with pytest.raises(MisuseError, match="is no plan: it is a device"):
        plan_from_file(decoder, Path("/dev/zero"))


@needs_caches
def test_states_may_be_corrected(decoder: Path, tmp_path: Path) -> None:
    """The caller feeds and gets a state that was removed; a state that the model lacks is refused."""
    path = tmp_path / "plan.json"
    write_plan(plan_model(decoder, parse_devices(["2xcpu"]), LAYER), path)
    edit(path, lambda plan: plan["states"].pop())
    with pytest.raises(MisuseError, match=r"leaves out the state of .* plan again, with --no-state and --state"):
        plan_from_file(decoder, path)
    write_plan(plan_model(decoder, parse_devices(["2xcpu"]), replace(LAYER, no_fuse=True)), path)
    content = json.loads(path.read_text())
    found = content["states"]
    content["states"] = found[1:]
    path.write_text(json.dumps(content))
    assert [state.input for state in plan_from_file(decoder, path).analysis.states] == [s["input"] for s in found[1:]]
    content["states"] = [{"input": "input_ids", "output": "nothing"}]
    path.write_text(json.dumps(content))
    with pytest.raises(MisuseError, match="the plan's state input_ids=nothing: the model has no output 'nothing'"):
        plan_from_file(decoder, path)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("mode", ["layer", "tensor", "row"])
def test_damaged_plans_end_in_a_message(decoder: Path, tmp_path: Path, mode: str, seed: int) -> None:
    """Or give another valid plan of the model."""
    path = tmp_path / "plan.json"
    request = Request(split_mode=mode, row_min=16) if mode == "row" else Request(split_mode=mode)
    write_plan(plan_model(decoder, ["2xcpu"], request), path)
    whole, random = path.read_text(), np.random.default_rng(seed)
    for _ in range(8):
        fields = json.loads(whole)
        damage_json(fields, random)
        path.write_text(json.dumps(fields))
        try:
            plan_from_file(decoder, path)
        except SplitcError as error:
            assert len(str(error)) < 2000
