"""Placed weights in groups that have the whole model each: every group has a device of its own for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitc.compiler import Plan, Request, compile_model, plan_model
from splitc.compiler.modes.auto import predict
from splitc.compiler.modes.replanning import plan_from_file
from splitc.compiler.planning.plan_file import to_file, write_plan
from splitc.compiler.request.places import ExpertsPlace, Place
from splitc.runtime import Session
from splitc.runtime.errors import MisuseError
from splitc.runtime.hardware.machine import Machine
from tests.conftest import assert_close, decoder_feeds, run_whole
from tests.helpers.greedy import plain_loop
from tests.helpers.mixtures import FORMS, Mixtures, Sizes
from tests.helpers.needs import need_experts
from tests.helpers.placed import assert_same

EXPERTS = ExpertsPlace("cpu1")
# Lengths and rows of requests.
SIZES = ((5, 4), (1, 1), (2, 7))


def make_plan(model: Path, devices: str = "4xcpu", split_mode: str = "batch", **asked: object) -> Plan:
    shapes = asked.pop("shapes", {"ids": (4, 5)})
    return plan_model(model, devices, Request(split_mode, shapes=shapes, **asked))  # type: ignore[arg-type]


def devices_of(plan: Plan) -> list[tuple[str, int]]:
    return [(str(rank.device), rank.replica) for rank in plan.ranks]


@pytest.mark.parametrize("form", [form for form in FORMS if form != "loop"])  # whose rows meet where they are scattered
def test_experts_of_whole_copies(tmp_path: Path, mixtures: Mixtures, form: str) -> None:
    need_experts(form)
    model = mixtures(form)
    plan = make_plan(model, experts=EXPERTS)
    assert devices_of(plan) == [("cpu0", 0), ("cpu1", 0), ("cpu2", 1), ("cpu3", 1)]
    for number in (1, 3):
        weights = plan.analysis.costs.weights(plan.ranks[number].stage.nodes)
        assert all(".mixture" in (weight.name or "") or "Constant" in (weight.name or "") for weight in weights)
    assert to_file(plan).placed.keys() >= {weight.name for weight in plan.analysis.partition.placed[0].weights}
    assert_same(model, plan, tmp_path / "package", SIZES)


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_groups_in_layer_mode(tmp_path: Path, mixtures: Mixtures, ranks: str) -> None:
    """Each group has two stages, and a device for the experts of both."""
    model = mixtures("dense", 4)
    plan = make_plan(model, "6xcpu", "layer", experts=ExpertsPlace("cpu2"), batch_groups=2, spread=True)
    assert devices_of(plan) == [(f"cpu{number}", number // 3) for number in range(6)]
    assert_same(model, plan, tmp_path / "package", SIZES, ranks)


def test_all_devices_of_a_group_are_named(mixtures: Mixtures) -> None:
    """Weights placed on the first device stay in its blocks, as in layer mode. Any group's devices may be named."""
    model = mixtures("fused")
    plan = make_plan(model, place=[Place("layers.0.*mixture", "cpu0")], experts=ExpertsPlace("cpu1"))
    held = {weight.name for weight in plan.analysis.costs.weights(plan.ranks[2].stage.nodes)}
    assert "layers.0.mixture.first" in held and "layers.1.mixture.first" not in held
    other = make_plan(model, "4xcpu", "layer", batch_groups=2, experts=ExpertsPlace("cpu3"))
    assert to_file(other).placed == to_file(make_plan(model, experts=EXPERTS)).placed


def test_plan_is_read_back(tmp_path: Path, mixtures: Mixtures) -> None:
    """Also if another group than the first has the least memory, so that the plan is made for that group."""
    model = mixtures("gathered")
    memory = ["1GiB", "cpu2=900MiB", "cpu3=800MiB"]
    plan = make_plan(model, experts=EXPERTS, memory=memory)
    assert {own.device for own in plan.analysis.partition.placed} == {"cpu1"}
    write_plan(plan, tmp_path / "plan.json")
    again = plan_from_file(model, tmp_path / "plan.json")
    assert to_file(again) == to_file(plan)
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(
        text.replace('"layers.0.mixture.first": "cpu1"', '"layers.0.mixture.first": "cpu3"')
    )
    with pytest.raises(MisuseError, match='cpu3" under "placed": placed weights go to ranks without blocks'):
        plan_from_file(model, tmp_path / "plan.json")


def test_states_stay_with_their_group(deep_decoder: Path, tmp_path: Path) -> None:
    """If a layer's weights are placed, its cache is on that device of the group that has the sequence."""
    plan = make_plan(deep_decoder, place=[Place(r"layers\.2\.", "cpu1")], shapes={})
    compile_model(plan, tmp_path / "package", verify=False)
    with Session(tmp_path / "package", threads=1) as session:
        feeds = decoder_feeds(batch=5, layers=4)
        assert_close(session.run(feeds), run_whole(deep_decoder, feeds))
        assert list(session.generate([5, 9, 2], max_new_tokens=5)) == plain_loop(deep_decoder, [5, 9, 2], 5)


def test_predicted_time_is_that_of_a_groups_rows(mixtures: Mixtures) -> None:
    """Two groups halve a request's time if computing the rows takes longer than reading the weights."""
    model = mixtures("stacked", 2, Sizes(rows=2000, wide=256, inner=512))
    asked = {"experts": EXPERTS, "shapes": {"ids": (8, 128)}}
    grouped, alone = (
        predict(make_plan(model, devices, mode, **asked), Machine(), 1).latency
        for devices, mode in (("4xcpu", "batch"), ("2xcpu", "layer"))
    )
    assert 0.45 * alone < grouped < 0.65 * alone


def test_groups_relieve_themselves(tmp_path: Path, mixtures: Mixtures) -> None:
    """If blocks alone do not fit, the planner places experts in each group, and the plan says on which devices."""
    model = mixtures("dense", 2, Sizes(rows=3000, wide=256, inner=256, experts=8))
    asked = {"spread": True, "batch_groups": 2, "shapes": {"ids": (2, 3)}}
    engines = max(rank.memory.engines for rank in make_plan(model, "4xcpu", "layer", **asked).ranks)
    for tenths in range(112, 100, -1):
        plan = make_plan(model, "4xcpu", "layer", **asked, memory=[f"{engines + tenths * (1 << 20) // 10}"])
        if plan.analysis.partition.placed:
            break
    assert [own.device for own in plan.analysis.partition.placed] == [str(plan.ranks[1].device)]
    write_plan(plan, tmp_path / "plan.json")
    assert to_file(plan_from_file(model, tmp_path / "plan.json")).placed == to_file(plan).placed
    assert_same(model, plan, tmp_path / "package", SIZES)


def test_each_group_needs_its_device(mixtures: Mixtures) -> None:
    model = mixtures("fused")
    with pytest.raises(MisuseError, match="the 3 devices are one group with those that weights are placed on"):
        make_plan(model, "3xcpu", experts=ExpertsPlace("cpu2"))
    with pytest.raises(MisuseError, match="in batch mode the 4 devices are 2 groups"):
        make_plan(model, experts=EXPERTS, batch_groups=4)
