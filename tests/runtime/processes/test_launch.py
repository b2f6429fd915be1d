"""The connections between ranks, and the descriptors that they take."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.hardware.devices import parse_devices
from splitc.runtime.ipc.channel import Channel
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.package.steps import Reduce
from splitc.runtime.processes.device_processes import DeviceProcess
from splitc.runtime.processes.launch import _Sockets, find_pairs
from splitc.runtime.processes.messages import Start
from tests.conftest import decoder_feeds, run_whole

FOUR = parse_devices(["4xcpu"])


@pytest.fixture(scope="module")
def four(decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four stages, each of which sends to the next one."""
    package = tmp_path_factory.mktemp("four") / "package"
    compile_model(plan_model(decoder, ["4xcpu"], Request(split_mode="layer", spread=True)), package, verify=False)
    return package


def test_ranks_are_connected_with_those_that_they_send_to(four: Path, decoder: Path, monkeypatch: Any) -> None:
    known: dict[int, set[int]] = {}
    host = DeviceProcess.host

    def seen_host(process: DeviceProcess, start: Start, descriptors: Sequence[int]) -> Channel:
        known[start.number] = set(start.peers)
        return host(process, start, descriptors)

    monkeypatch.setattr(DeviceProcess, "host", seen_host)
    with Session(four, threads=1, ranks="processes") as session:
        outputs = session.run(decoder_feeds())
    assert known == {0: {1}, 1: {0, 2}, 2: {1, 3}, 3: {2}}
    for name, whole in run_whole(decoder, decoder_feeds()).items():
        np.testing.assert_allclose(outputs[name], whole, rtol=1e-4, atol=1e-5)


def test_ranks_that_sum_between_engines_are_connected_with_each_other(four: Path) -> None:
    manifest = read_manifest(four)
    ranks = list(manifest.ranks)
    ranks[1] = msgspec.structs.replace(ranks[1], program=[*ranks[1].program, Reduce("sum", ["x"], ["y"], [3, 1, 2])])
    found = find_pairs(msgspec.structs.replace(manifest, ranks=ranks), FOUR)
    assert found == {(0, 1), (1, 2), (1, 3), (2, 3)}


def test_gpus_are_all_connected(four: Path) -> None:
    devices = parse_devices(["cpu0", "cpu1", "cpu2", "cuda0"])
    assert find_pairs(read_manifest(four), devices) == set(combinations(range(4), 2))


def test_ends_are_there_as_long_as_they_have_to_wait() -> None:
    """The ends for all pairs of 40 ranks are more than many systems allow a process."""
    most, ranks, process = 0, 40, psutil.Process()
    before = process.num_fds()
    with ExitStack() as stack:
        sockets = _Sockets(combinations(range(ranks), 2), stack)
        for rank in range(ranks):
            ends = sockets.open(rank)
            assert set(ends) == set(range(ranks)) - {rank}
            most = max(most, process.num_fds() - before)
            for each in ends.values():
                each.close()
        assert process.num_fds() == before
    assert most <= ranks * ranks // 4 + ranks
