"""Placed weights beside fake GPUs: values go to the other device and come back within a request."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.request.places import Place
from splitc.runtime import Session
from splitc.runtime.cli.run_options import measure_ranks
from splitc.runtime.engines.operator_library import is_built
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.package.steps import Receive, Run, Send
from tests.conftest import assert_close, decoder_feeds, run_whole
from tests.helpers.feeds import LAYERS

pytestmark = pytest.mark.usefixtures("gpus")

DEVICES = [["cuda0", "cuda1"], ["cuda0", "cuda1", "cpu0"]]


def make_package(model: Path, package: Path, devices: list[str], no_fuse: bool = False) -> Manifest:
    """A package with the feed-forward weights on the last device."""
    memory = [f"{device}=1GiB" for device in devices]
    place = [Place("mlp", devices[-1])]
    request = Request(split_mode="layer", place=place, memory=memory, spread=True, no_fuse=no_fuse)
    plan = plan_model(model, devices, request)
    assert [str(rank.device) for rank in plan.ranks] == devices
    compile_model(plan, package, verify=False)
    return read_manifest(package)


@pytest.mark.parametrize("devices", DEVICES)
def test_feed_forward_parts_on_another_device(
    decoder: Path, tmp_path: Path, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transfers are between engines, which fake GPUs support. These don't know sizes that come from another engine."""
    monkeypatch.setattr("splitc.compiler.lowering.segments.has_collectives", lambda engine, devices: False)
    placed = make_package(decoder, tmp_path / "package", devices, no_fuse=True).ranks[-1]
    assert [type(step) for step in placed.program] == [Receive, Run, Send] * LAYERS
    with Session(tmp_path / "package", verify="never") as session:
        for length in (3, 1, 3, 3, 3, 3):
            feeds = decoder_feeds(2, length, 5)
            assert_close(session.run(feeds), run_whole(decoder, feeds))


@pytest.mark.skipif(not is_built(), reason="splitc was installed without a C compiler")
@pytest.mark.parametrize("devices", DEVICES)
def test_gpus_and_cpus_exchange_inside_engines(decoder: Path, tmp_path: Path, devices: list[str]) -> None:
    ranks = make_package(decoder, tmp_path / "package", devices).ranks
    assert [len(rank.engines) for rank in ranks] == [1] * len(devices)
    assert {tuple(engine.group) for rank in ranks for engine in rank.engines} == {tuple(range(len(devices)))}


def test_memory_of_gpus_and_cpus_is_measured(decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitc.compiler.lowering.segments.has_collectives", lambda engine, devices: False)
    make_package(decoder, tmp_path / "package", ["cuda0", "cpu0"])
    load = partial(Session, tmp_path / "package", verify="never")
    with load() as session:
        measured = measure_ranks(load, session, decoder_feeds(2, 3, 5))
    assert [memory.device for memory in measured] == ["cuda0", "cpu0"]


GROUPS = [
    ("tensor", ["cuda0", "cuda1", "cpu0"]),
    ("batch", ["cuda0", "cpu0", "cuda1", "cpu1"]),
]


@pytest.mark.parametrize(("mode", "devices"), GROUPS)
def test_beside_shards_and_in_groups(
    decoder: Path, tmp_path: Path, mode: str, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only GPUs sum, and each group of batch mode has a device for placed weights."""
    monkeypatch.setattr("splitc.compiler.lowering.segments.has_collectives", lambda engine, devices: False)
    memory = [f"{device}=4GiB" for device in devices]
    place = devices[1] if mode == "batch" else devices[-1]
    plan = plan_model(decoder, devices, Request(mode, place=[Place("mlp", place)], memory=memory))
    assert [str(rank.device) for rank in plan.ranks] == devices
    compile_model(plan, tmp_path / "package", verify=False)
    with Session(tmp_path / "package", verify="never") as session:
        for length in (3, 1, 3, 3, 3, 3):
            feeds = decoder_feeds(2, length, 5)
            assert_close(session.run(feeds), run_whole(decoder, feeds))
