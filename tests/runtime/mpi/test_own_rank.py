"""The rank in the session's own process, without MPI."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from splitc.runtime.errors import PackageError
from splitc.runtime.hardware.devices import parse_devices
from splitc.runtime.mpi import rank as mpi_rank
from splitc.runtime.mpi import ranks as mpi_ranks
from splitc.runtime.mpi import world
from splitc.runtime.mpi.messages import Join, Left
from splitc.runtime.mpi.ranks import MpiRanks
from splitc.runtime.mpi.wire import OwnControl
from splitc.runtime.package.manifest_file import read_seal
from splitc.runtime.processes.remote import RemoteRanks
from tests.helpers.packages import compile_mode


@pytest.fixture
def ranks() -> MpiRanks:
    """Two ranks that load."""
    made: Any = object.__new__(MpiRanks)
    deployment: Any = SimpleNamespace(manifest=None, devices=parse_devices(["2xcpu"]), first=0)
    RemoteRanks.__init__(made, deployment, lambda _: None)
    made._world = made._everyone = SimpleNamespace(broken=threading.Event(), hosts=("here", "here"))
    made._wire = SimpleNamespace(send=lambda _: None)
    made._join = None
    ranks: MpiRanks = made
    return ranks


def test_rank_that_leaves_before_it_has_loaded_ends_the_wait(ranks: MpiRanks) -> None:
    ranks._lost(1)
    for loaded in ranks._loaded:
        assert "rank 1 (cpu1 on here) has left the session" in str(loaded.exception(0))


def test_own_rank_that_fails_says_why(ranks: MpiRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread can't raise the error to anyone, and the session must not wait for it forever."""

    def fail(*_: Any) -> None:
        raise PackageError("this host has no memory to meet in")

    monkeypatch.setattr(mpi_ranks, "run_rank", fail)
    own = OwnControl()
    ranks._run_own(own)
    while not isinstance(message := own.outbox.get(timeout=5)[0], Left):
        ranks._take(0, message)
    ranks._lost(0)
    assert "this host has no memory to meet in" in str(ranks._loaded[0].exception(0))


def test_host_without_the_library_is_named(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before ranks wait for each other to connect."""

    def missing() -> None:
        raise PackageError("this machine has no library")

    package = compile_mode(decoder, "tensor")
    devices = tuple(parse_devices(["2xcpu"]))
    join = Join(0, package, read_seal(package), devices, 1, "never", False, 0.0, 0, 2, 0)
    world: Any = SimpleNamespace(rank=0, size=2, hosts=("one", "other"), machines=(0, 1), here=[0])
    monkeypatch.setattr(mpi_rank, "load_library", missing)
    with pytest.raises(PackageError, match="rank 0 on one: this machine has no library"):
        mpi_rank._prepare(world, join)


@pytest.mark.parametrize(("said", "several"), [("", False), ("1", False), ("many", False), ("4", True)])
def test_counts_that_are_no_numbers_say_nothing(monkeypatch: pytest.MonkeyPatch, said: str, several: bool) -> None:
    for name in (*world.NUMBERS, *world.COUNTS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", said)
    assert world.started_by_mpi() == several
