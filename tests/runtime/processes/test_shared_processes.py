"""The modules of a pipeline in one process for each device: on CPU devices, and on fake GPUs."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from splitc.runtime import Pipeline, Session
from splitc.runtime.errors import PackageError, SplitcError
from splitc.runtime.hardware.devices import parse_devices
from splitc.runtime.processes.ranks import RankProcesses
from splitc.runtime.requests.rank_kinds import PROCESSES, THREADS, choose_ranks
from tests.conftest import assert_close, decoder_feeds, run_whole, until
from tests.helpers import fake_gpu_sessions
from tests.helpers.maps import mapped
from tests.helpers.packages import compile_mode, write_modules

# Seconds within which a request ends with an error.
BOUND = 10.0


@pytest.fixture
def pipeline(decoder: Path, package: Path, tmp_path: Path) -> Path:
    """One model as three modules, on three devices, two, and one."""
    packages = {
        "first": package,
        "second": compile_mode(decoder, "tensor"),
        "third": compile_mode(decoder, "one device"),
    }
    return write_modules(tmp_path / "pipeline", packages)


@pytest.fixture
def twice(decoder: Path, tmp_path: Path) -> Path:
    """One model as two modules on one device."""
    return write_modules(tmp_path / "twice", dict.fromkeys(("first", "second"), compile_mode(decoder, "one device")))


def pids(session: Session) -> list[int]:
    """The process of each rank."""
    assert isinstance(session._workers, RankProcesses)
    return [each.pid for each in session._workers._processes]


def own_children() -> set[int]:
    return {child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}


def test_each_device_has_one_process(pipeline: Path, decoder: Path) -> None:
    feeds, before = decoder_feeds(), own_children()
    expected = run_whole(decoder, feeds)
    with Pipeline(pipeline, threads=1, ranks="processes") as opened:
        started = own_children() - before
        assert len(started) == 3
        all_of = pids(opened["first"])
        assert [pids(session) for session in opened.values()] == [all_of, all_of[:2], all_of[:1]]
        futures = [session.submit(feeds) for _ in range(3) for session in opened.values()]  # at the same time
        for future in futures:
            assert_close(future.result(), expected)
        opened["first"].close()
        for name in ("second", "third"):
            assert_close(opened[name].run(feeds), expected)
        until(lambda: own_children() - before == set(all_of[:2]))  # the third device has no ranks any more
    assert own_children() == before


def test_memory_of_a_model_that_is_closed_is_freed(twice: Path) -> None:
    """At once: the process goes on with other modules' ranks, and may not collect garbage for long."""
    with Pipeline(twice, threads=1, ranks="processes") as opened:
        (pid,) = pids(opened["first"])
        before, feeds = mapped(pid), decoder_feeds(batch=100)
        opened["first"].run(feeds)
        assert mapped(pid) - before > 2 * sum(feed.nbytes for feed in feeds.values())  # the caches come back longer
        opened["first"].close()
        until(lambda: mapped(pid) == before)


def test_many_modules_take_few_descriptors_and_threads(decoder: Path, tmp_path: Path) -> None:
    """A descriptor for each rank, in the caller and in its process, and a thread for each rank, in its process only."""
    count, ranks, few, caller = 8, 2, 8, psutil.Process()
    modes = ["layer", "tensor"]
    folder = write_modules(
        tmp_path / "pipeline", {f"module{n}": compile_mode(decoder, modes[n % 2]) for n in range(count)}
    )
    before = caller.num_fds(), caller.num_threads()
    with Pipeline(folder, threads=1, ranks="processes") as opened:
        for _ in range(3):  # all memory that requests need
            for future in [session.submit(decoder_feeds()) for session in opened.values() for _ in range(6)]:
                future.result(20)
        assert caller.num_fds() - before[0] <= count * ranks + 2 * ranks + few
        for each in map(psutil.Process, pids(opened["module0"])):
            assert each.num_fds() <= count + ranks + few
            assert each.num_threads() <= count + few
        until(lambda: caller.num_threads() - before[1] <= 1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_process_that_dies_or_hangs_breaks_all_modules_in_it(
    pipeline: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitc.runtime.processes.ranks.PATIENCE", 2.0)  # for a shorter test
    feeds = decoder_feeds()
    with Pipeline(pipeline, threads=1, ranks="processes") as opened:
        psutil.Process(pids(opened["first"])[1]).send_signal(number)
        start = time.monotonic()
        for name in ("first", "second"):
            with pytest.raises(SplitcError, match=r"the session is broken: .*rank 1 \(cpu1\)"):
                while time.monotonic() < start + BOUND:
                    opened[name].run(feeds)
        # It had no rank there, but one in a process that had to be ended.
        with pytest.raises(SplitcError, match=r"ranks of another model in it broke: .*rank 1 \(cpu1\)"):
            while time.monotonic() < start + BOUND:
                opened["third"].run(feeds)
        assert time.monotonic() < start + BOUND


def test_pipeline_that_can_not_load_leaves_nothing(twice: Path) -> None:
    before = own_children()
    (file,) = (twice / "second" / "rank0").glob("*.onnx")
    file.write_bytes(b"damaged")
    with pytest.raises(PackageError, match=file.name):
        Pipeline(twice, ranks="processes", verify="never")
    assert own_children() == before


def test_gpus_have_one_process_each(decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a module on only one of them."""
    monkeypatch.setattr("splitc.runtime.processes.device_processes.MAIN", "tests.helpers.fake_rank")
    packages = {"both": fake_gpu_sessions.package(decoder, "tensor", 2), "alone": compile_mode(decoder, "one device")}
    folder = write_modules(tmp_path / "pipeline", packages)
    feeds, own = decoder_feeds(), {"both": {"devices": ["2xcuda"]}, "alone": {"devices": ["cuda1"]}}
    with Pipeline(folder, own=own) as opened:
        assert pids(opened["both"])[1:] == pids(opened["alone"])
        expected = run_whole(decoder, feeds)
        for _ in range(6):  # the last ones are replayed
            for session in opened.values():
                assert_close(session.run(feeds), expected, 1e-4)


def test_what_ranks_of_several_models_are_by_default() -> None:
    shared = parse_devices(["cuda0", "cuda1", "cpu0"])
    for devices, kind in (
        (["cuda1"], PROCESSES),
        (["cuda0", "cuda1"], PROCESSES),
        (["cpu0"], THREADS),
        (["cuda0", "cuda0"], PROCESSES),
        (["cuda0", "cpu0"], PROCESSES),
    ):
        assert choose_ranks(None, parse_devices(devices), None, shared) == kind
    assert choose_ranks(None, parse_devices(["cuda1"]), None, parse_devices(["cuda1", "cpu0"])) == THREADS
    assert choose_ranks("processes", parse_devices(["cuda1"]), None) == PROCESSES


def test_rank_that_can_have_no_thread_ends_its_process(twice: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its session would wait forever, since the process goes on with other modules' ranks."""
    monkeypatch.setattr("splitc.runtime.processes.device_processes.MAIN", "tests.helpers.threadless_rank")
    before = own_children()
    with pytest.raises(SplitcError, match=r"the process of rank 0 \(cpu0\) ended with exit code 1"):
        Pipeline(twice, threads=1, ranks="processes")
    assert own_children() == before
