"""Hosts in plans: how groups are placed on them, the cost of links between them, and messages about them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from splitc.compiler import Request, plan_model
from splitc.compiler.modes.auto import choose, predict
from splitc.compiler.modes.replanning import plan_from_file
from splitc.compiler.planning.host_groups import describe_hosts, group_devices
from splitc.compiler.planning.plan import Alternative, Plan
from splitc.compiler.planning.plan_file import to_file, write_plan
from splitc.runtime.errors import MisuseError
from splitc.runtime.hardware.devices import parse_devices, parse_hosts
from splitc.runtime.hardware.machine import Machine
from splitc.runtime.hardware.profiles import Link
from tests.conftest import DECODER
from tests.helpers.command import splitc

FREE = Machine({"cpu-cpu": Link(0.0, 0.0)}, {"cpu-cpu": Link(0.0, 0.0)}, interconnect=Link(0.0, 0.0))
FAR = Machine(FREE.copies, FREE.sums, interconnect=Link(1.0, 0.0))


def named(plan: Plan) -> list[str]:
    return [str(rank.device) for rank in plan.ranks]


@pytest.mark.parametrize(
    ("names", "budgets", "groups", "size", "expected"),
    [
        ("4xcpu", [1, 4, 2, 3], 1, 2, [1, 3]),
        ("host0/2xcpu&host1/2xcpu", [1, 1, 1, 1], 2, 2, [0, 1, 2, 3]),
        ("host0/cpu0&host1/cpu0&host0/cpu1&host1/cpu1", [1, 1, 1, 1], 2, 2, [0, 2, 1, 3]),
        ("host0/2xcpu&host1/2xcpu", [9, 1, 2, 2], 1, 2, [2, 3]),
        ("host0/3xcpu&host1/5xcpu", [1] * 8, 2, 4, [0, 1, 2, 7, 3, 4, 5, 6]),
        ("host0/3xcpu&host1/5xcpu", [1] * 8, 3, 2, [0, 1, 3, 4, 5, 6]),
        ("host0/2xcpu&host1/2xcpu", [1] * 4, 1, 3, [0, 1, 2]),
        ("host0/2xcpu&host1/2xcpu", [None] * 4, 3, 1, [0, 1, 2]),
    ],
)
def test_groups_are_inside_hosts_where_they_can_be(
    names: str, budgets: Sequence[int | None], groups: int, size: int, expected: list[int]
) -> None:
    assert group_devices(parse_devices([names]), budgets, groups, size) == expected


def test_groups_of_a_tensor_plan_follow_hosts_and_keep_their_shares(decoder: Path) -> None:
    devices = ["host0/cpu0", "host1/cpu0", "host0/cpu1", "host1/cpu1"]
    request = Request(split_mode="tensor", pipeline_stages=2, tensor_split=[3, 2, 1, 2], memory=["1GiB"])
    plan = plan_model(decoder, devices, request)
    assert named(plan) == ["host0/cpu0", "host0/cpu1", "host1/cpu0", "host1/cpu1"]
    assert [rank.share for rank in plan.ranks] == [3, 1, 2, 2]
    assert describe_hosts(plan.ranks) == "2 hosts, groups inside"


def test_ranks_of_a_host_are_in_a_row_after_the_main_one(decoder: Path) -> None:
    request = Request(split_mode="row", row_min=16, main_device="host1/cpu1", memory=["1GiB"])
    plan = plan_model(decoder, parse_hosts("2x2xcpu"), request)
    assert named(plan) == ["host1/cpu1", "host1/cpu0", "host0/cpu0", "host0/cpu1"]


def test_auto_tries_groups_inside_hosts(decoder: Path) -> None:
    plan = plan_model(decoder, ["host0/4xcpu", "host1/2xcpu"], Request(memory=["1GiB"]))
    lying = {each.name: each.placement for each in plan.alternatives if each.refused is None}
    assert lying["tensor on 4"] == "1 host"
    assert lying["tensor on 6"] == "2 hosts, groups across"
    assert lying["tensor on 6 in 3 stages"] == "2 hosts, groups inside"
    assert lying["layer on 6"] == "2 hosts"
    written = {each.name: each.placement for each in to_file(plan).candidates if each.refused is None}
    assert written == lying


def test_slow_links_keep_a_model_on_one_host(decoder: Path) -> None:
    # The throughput of replicas hardly depends on links.
    slow = Request(memory=["1GiB"], interconnect="1MB/s,1s", objective="latency")
    assert {rank.device.host for rank in plan_model(decoder, parse_hosts("2x2xcpu"), slow).ranks} == {0}


def test_another_host_must_be_worth_it() -> None:
    near = Alternative("a", "tensor", 8, 1.0, 1.0, 0.3, hosts=1)
    roomy = Alternative("b", "tensor", 16, 1.01, 1.0, 0.1, hosts=2)
    fast = Alternative("c", "layer", 16, 1.5, 0.5, 0.1, hosts=2)
    assert choose([near, roomy, fast], "latency") == near
    assert choose([near, roomy, fast], "throughput") == fast


def test_crossing_to_another_host_takes_its_link(decoder: Path) -> None:
    """For each cut between hosts, and each collective of a group on several hosts."""

    def more(plan: Plan) -> float:
        return predict(plan, FAR, 1).latency - predict(plan, FREE, 1).latency

    layer = Request(split_mode="layer", spread=True, memory=["1GiB"])
    assert more(plan_model(decoder, parse_hosts("2x2xcpu"), layer)) == pytest.approx(1, rel=1e-3)
    assert more(plan_model(decoder, parse_hosts("1x4xcpu"), layer)) == 0
    tensor = Request(split_mode="tensor", memory=["1GiB"])
    sums = 2 * DECODER.layers
    assert more(plan_model(decoder, parse_hosts("2x1xcpu"), tensor)) == pytest.approx(sums, rel=1e-3)
    assert more(plan_model(decoder, parse_hosts("2x2xcpu"), tensor)) == pytest.approx(sums, rel=1e-3)
    assert more(plan_model(decoder, parse_hosts("3x1xcpu"), tensor)) == pytest.approx(2 * sums, rel=1e-3)
    staged = replace(tensor, pipeline_stages=2)
    assert more(plan_model(decoder, parse_hosts("2x2xcpu"), staged)) == pytest.approx(1, rel=1e-3)


def test_cores_are_those_of_each_host(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of one host share its one core; ranks of two hosts do not."""
    monkeypatch.setattr("splitc.compiler.planning.clock.cores", lambda: 1)
    monkeypatch.setattr("splitc.runtime.hardware.devices.cores", lambda: 1)
    layer = Request(split_mode="layer", spread=True, memory=["1GiB"])
    crowded, apart = (
        predict(plan_model(decoder, parse_hosts(text), layer), FREE, 1) for text in ("1x2xcpu", "2x1xcpu")
    )
    assert apart.interval < 0.8 * crowded.interval


def test_what_is_guessed_of_hosts_is_said(decoder: Path) -> None:
    guessed = plan_model(decoder, parse_hosts("2x1xcpu"), Request(split_mode="layer"))
    memory, links = guessed.warnings
    assert "as if every host were like it: give --memory" in memory
    assert "a typical one (25 GB/s, 12 µs) is used" in links
    known = Request(split_mode="layer", memory=["1GiB"], interconnect="200Gbit/s,5us")
    assert plan_model(decoder, parse_hosts("2x1xcpu"), known).warnings == ()


@pytest.mark.parametrize("text", ["25GB/s", "25,5us", "5us,25GB/s", "25Gb/s,5us", "0GB/s,5us", "25GB/s,5", ""])
def test_other_links_are_refused(decoder: Path, text: str) -> None:
    with pytest.raises(MisuseError, match="can't read '"):
        plan_model(decoder, parse_hosts("2x1xcpu"), Request(interconnect=text))


def test_link_without_hosts_is_refused(decoder: Path) -> None:
    with pytest.raises(MisuseError, match="--interconnect is a link between hosts"):
        plan_model(decoder, ["2xcpu"], Request(interconnect="25GB/s,5us"))


def test_hosts_in_a_plan_file(decoder: Path, tmp_path: Path) -> None:
    """A rank's device moves it to another host. The number of hosts must agree."""
    path = tmp_path / "plan.json"
    write_plan(plan_model(decoder, parse_hosts("2x1xcpu"), Request(split_mode="layer", memory=["1GiB"])), path)
    content = json.loads(path.read_text())
    assert content["hosts"] == 2
    content["ranks"][1]["device"] = "host5/cpu0"
    path.write_text(json.dumps(content))
    assert named(plan_from_file(decoder, path)) == ["host0/cpu0", "host5/cpu0"]
    content["ranks"][1]["device"] = "host0/cpu1"
    path.write_text(json.dumps(content))
    with pytest.raises(MisuseError, match='the line "hosts: 2", and its ranks\' devices name host0: give it 1'):
        plan_from_file(decoder, path)


def test_plan_and_compile_for_hosts(deep_decoder: Path, tmp_path: Path) -> None:
    options = ["--hosts", "2x2xcpu", "--memory", "1GiB", "--interconnect", "25GB/s,5us", "--spread"]
    shown = splitc("plan", deep_decoder, *options, "-o", tmp_path / "plan.json").stdout
    assert "2 hosts, groups inside" in shown
    package = tmp_path / "package"
    splitc("compile", deep_decoder, "--plan", tmp_path / "plan.json", "-o", package)
    assert "start them with mpirun" in splitc("check", package, "--model", deep_decoder, code=2).stderr
    count = len(json.loads((package / "manifest.json").read_text())["ranks"])
    splitc("check", package, "--model", deep_decoder, "-d", f"{count}xcpu", "--no-memory")
