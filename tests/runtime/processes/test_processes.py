"""Ranks in processes: their results, and what happens when they or their caller end."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from splitc.runtime import Session
from splitc.runtime.errors import EngineError, MisuseError, PackageError, SplitcError
from splitc.runtime.hardware.devices import parse_devices
from splitc.runtime.ipc.channel import MOST, Channel
from splitc.runtime.ipc.mapped_files import NCCL, find_mapped, remove_files
from splitc.runtime.processes.device_processes import DeviceProcess, visible
from splitc.runtime.processes.messages import Loaded, Report, Start
from splitc.runtime.processes.rank import RankProcess
from splitc.runtime.processes.ranks import RankProcesses
from splitc.runtime.processes.reader import LOOK
from splitc.runtime.processes.remote import PATIENCE
from splitc.runtime.requests.rank_kinds import PROCESSES, THREADS, choose_ranks
from tests.conftest import decoder_feeds, run_whole, until
from tests.helpers.greedy import plain_loop
from tests.helpers.maps import mapped
from tests.helpers.packages import compile_mode
from tests.helpers.stopping import stop

# Seconds within which a request ends with an error.
BOUND = 10.0


@pytest.fixture(scope="module")
def opened(decoder: Path) -> Iterator[Session]:
    """A session of two processes, for all tests that do not change it."""
    with open_processes(compile_mode(decoder, "tensor"), 2) as session:
        yield session


def open_processes(package: Path, in_flight: int | None = None) -> Session:
    return Session(package, threads=1, ranks="processes", in_flight=in_flight)


@pytest.mark.usefixtures("plain_ranks")
def test_interrupt_while_a_process_starts_is_the_callers(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal sends it to all processes: Python would end those that are starting, with a traceback."""
    start = subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = start(*arguments, **options)
        process.send_signal(signal.SIGINT)
        return process

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with open_processes(compile_mode(decoder, "tensor"), 2) as session:
        assert session.run(decoder_feeds())


def processes(session: Session) -> list[subprocess.Popen[bytes]]:
    assert isinstance(session._workers, RankProcesses)
    return [each._process for each in session._workers._processes]


@pytest.mark.parametrize("mode", ["row", "tensor in layers"])
def test_outputs_are_the_models(mode: str, decoder: Path) -> None:
    prompt = [5, 17, 33, 2]
    lengths = [1, 3, 40, 1, 40]  # slots of shared memory grow, and are used again
    with open_processes(compile_mode(decoder, mode), 2) as session:
        futures = [session.submit(decoder_feeds(new=length)) for length in lengths]
        for length, future in zip(lengths, futures, strict=True):
            outputs = future.result()
            for name, whole in run_whole(decoder, decoder_feeds(new=length)).items():
                np.testing.assert_allclose(outputs[name], whole, rtol=1e-4, atol=1e-5)
        assert list(session.generate(prompt, max_new_tokens=12)) == plain_loop(decoder, prompt, 12)


def test_memory_of_a_large_request_is_given_back(
    opened: Session, decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller and the ranks free its feeds when many small requests follow."""
    monkeypatch.setattr("splitc.runtime.ipc.demand.RECENT", 20)

    def shared() -> list[int]:
        return [mapped(), *(mapped(process.pid) for process in processes(opened))]

    large = decoder_feeds(batch=1000)
    opened.run(large)
    before = shared()
    outputs = [opened.run(decoder_feeds()) for _ in range(44)][-1]
    size = sum(feed.nbytes for feed in large.values())
    assert all(was - now > size for now, was in zip(shared(), before, strict=True))
    for name, whole in run_whole(decoder, decoder_feeds()).items():
        np.testing.assert_allclose(outputs[name], whole, rtol=1e-4, atol=1e-5)


def test_sequences_begin_with_loaded_states(opened: Session, decoder: Path) -> None:
    feeds = decoder_feeds()
    states = {name: array for name, array in feeds.items() if name.startswith("past")}
    rest = {name: array for name, array in feeds.items() if name not in states}
    with opened.start() as sequence:
        sequence.load(states)
        np.testing.assert_allclose(
            sequence.run(rest)["logits"], run_whole(decoder, feeds)["logits"], rtol=1e-4, atol=1e-5
        )


def test_request_that_fails_on_all_ranks_fails_alone(opened: Session) -> None:
    feeds = decoder_feeds()
    wrong = {**feeds, "input_ids": np.full_like(feeds["input_ids"], 1000)}
    with pytest.raises(EngineError):
        opened.run(wrong)
    opened.run(feeds)


def test_interrupt_of_all_processes_is_the_callers(opened: Session) -> None:
    """A terminal sends it to all processes. The caller may go on, as in a notebook."""
    for process in processes(opened):
        process.send_signal(signal.SIGINT)
    opened.run(decoder_feeds())
    assert [process.poll() for process in processes(opened)] == [None, None]


def test_hang_is_noticed_within_the_bound() -> None:
    assert PATIENCE + 3 * LOOK < BOUND  # two looks may be 2 * LOOK apart


@pytest.mark.parametrize(
    ("mode", "number"),
    [("layer", signal.SIGKILL), ("tensor", signal.SIGKILL), ("tensor", signal.SIGSTOP)],
)
def test_rank_that_dies_or_hangs_ends_the_request(
    decoder: Path, mode: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitc.runtime.processes.ranks.PATIENCE", 2.0)  # for a shorter test
    with open_processes(compile_mode(decoder, mode)) as session:
        session.run(decoder_feeds())
        processes(session)[1].send_signal(number)
        start = time.monotonic()
        with pytest.raises(SplitcError, match=r"the session is broken: .*rank 1 \(cpu1\)"):
            while time.monotonic() < start + BOUND:
                session.run(decoder_feeds())
        assert time.monotonic() < start + BOUND
        with pytest.raises(SplitcError, match=r"rank 1 \(cpu1\)"):
            session.run(decoder_feeds())
        for process in processes(session):
            process.wait(5)


@pytest.mark.usefixtures("plain_ranks")
def test_ranks_load_nothing_that_only_others_need(decoder: Path) -> None:
    """psutil takes 20 ms in each process that starts."""
    with open_processes(compile_mode(decoder, "tensor")) as session:
        session.run(decoder_feeds())
        assert not [rank.pid for rank in processes(session) if "psutil" in Path(f"/proc/{rank.pid}/maps").read_text()]


def test_rank_that_can_not_load_is_named(decoder: Path, tmp_path: Path, copy_package: Callable[[Path], Path]) -> None:
    package = copy_package(compile_mode(decoder, "one device"))
    (file,) = (package / "rank0").glob("*.onnx")
    file.write_bytes(b"damaged")
    with pytest.raises(PackageError, match=file.name):
        Session(package, ranks="processes", verify="never")


def test_rank_that_can_not_be_told_to_start_is_named(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message to the second rank has more descriptors than the system lets through."""
    package, host = compile_mode(decoder, "layer"), DeviceProcess.host
    before = psutil.Process().children()

    def host_with_more(process: DeviceProcess, start: Start, descriptors: Sequence[int]) -> Channel:
        return host(process, start, [*descriptors, *[descriptors[0]] * MOST * start.number])

    monkeypatch.setattr(DeviceProcess, "host", host_with_more)
    with pytest.raises(EngineError, match=r"rank 1 \(cpu1\) could not be started in its process: .*Invalid argument"):
        open_processes(package)
    assert psutil.Process().children() == before


@pytest.fixture
def copy_package(tmp_path: Path) -> Callable[[Path], Path]:
    def copy(package: Path) -> Path:
        subprocess.run(["cp", "-r", package, tmp_path / "copy"], check=True)
        return tmp_path / "copy"

    return copy


# Without a guard for __main__, as in a notebook: what starts a process must not run this again.
SCRIPT = """
import os, sys, time
from splitc.runtime import Session
from splitc.runtime.ipc.channel import MOST, Channel
session = Session(sys.argv[1], threads=1, ranks="processes")
print(*[process.pid for process in session._workers._processes], flush=True)
if sys.argv[2] == "fork" and not os.fork():
    time.sleep(60)  # a copy of the caller, which holds its sockets
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["alone", "fork"])
def test_nothing_is_left_of_a_killed_caller(decoder: Path, how: str) -> None:
    command = [sys.executable, "-c", SCRIPT, str(compile_mode(decoder, "tensor")), how]
    caller = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    ranks = [psutil.Process(int(each)) for each in caller.stdout.readline().split()]
    children = psutil.Process(caller.pid).children()
    caller.kill()
    caller.wait()
    gone, alive = psutil.wait_procs(ranks, BOUND)
    assert len(gone) == len(ranks) and not alive
    for child in children:
        if child not in ranks:
            child.kill()
    caller.stdout.close()


def test_nothing_is_left_of_ranks_that_an_interrupt_finds_loading(
    decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its program may go on, as a notebook does."""
    monkeypatch.setattr("splitc.runtime.processes.device_processes.BEGIN", "tests.helpers.stopped_rank")
    package, process = compile_mode(decoder, "layer"), psutil.Process()
    before = process.children(), set(threading.enumerate())
    threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        open_processes(package)
    assert process.children() == before[0]
    until(lambda: set(threading.enumerate()) == before[1])  # one looks after ranks every now and then


# With less patience, for a shorter test.
STOPPED = """
import sys
from splitc.runtime import Session
from splitc.runtime.processes import ranks
from tests.helpers.feeds import decoder_feeds
ranks.PATIENCE = 2.5
with Session(sys.argv[1], threads=1, ranks="processes") as session:
    for _ in range(2):
        session.run(decoder_feeds())
        print("ran", flush=True)
        sys.stdin.readline()
"""


def test_stop_of_all_processes_does_not_break_the_session(decoder: Path) -> None:
    """As by Ctrl-Z, or in a frozen container: a process that was stopped itself heard no other."""
    caller = subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(compile_mode(decoder, "layer"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert caller.stdout is not None and caller.stdout.readline() == "ran\n"
    os.killpg(caller.pid, signal.SIGSTOP)
    time.sleep(4)
    os.killpg(caller.pid, signal.SIGCONT)
    time.sleep(1.5)  # for some looks at the ranks
    shown, _ = caller.communicate("\n\n", timeout=60)
    assert (caller.returncode, shown) == (0, "ran\n")


DESCRIPTORS = """
import gc, os, sys
from splitc.runtime import Session
from tests.helpers.feeds import decoder_feeds
gc.disable()
for _ in range(2):
    with Session(sys.argv[1], threads=1, ranks="processes") as session:
        session.run(decoder_feeds(batch=64))
    print(len(os.listdir("/proc/self/fd")))
"""


def test_closed_session_has_no_descriptors(decoder: Path) -> None:
    """Also before the garbage collector runs."""
    command = [sys.executable, "-c", DESCRIPTORS, str(compile_mode(decoder, "tensor"))]
    first, second = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    assert second == first


def test_threads_that_ask_at_once_each_get_reports(opened: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = opened._workers
    assert isinstance(ranks, RankProcesses)
    send, all_ask = ranks._wire.send, threading.Barrier(3)

    def send_together(message: Any) -> None:
        all_ask.wait(10)
        send(message)

    monkeypatch.setattr(ranks._wire, "send", send_together)
    with ThreadPoolExecutor(3) as pool:
        reports = [each.result() for each in [pool.submit(ranks._ask) for _ in range(3)]]
    assert [[isinstance(report, Report) for report in own] for own in reports] == [[True] * len(ranks)] * 3


def test_messages_that_come_late_are_dropped(decoder: Path) -> None:
    """A report for a request that was given up, and from a rank that loaded after another failed."""
    with open_processes(compile_mode(decoder, "one device")) as session:
        assert session.notes == []
        ranks = session._workers
        assert isinstance(ranks, RankProcesses)
        ranks._take(0, Report(None, ()))
        session.run(decoder_feeds())
        ranks.stop()
        ranks._take(0, Loaded(None))
    assert ranks._ask() == []  # and does not wait for what has ended


def test_copy_of_the_caller_asks_the_ranks_nothing(opened: Session) -> None:
    """It would start a thread that reads the answers for which the session waits."""
    until(lambda: all(thread.name != "splitc ranks" for thread in threading.enumerate()))  # the session's own
    child = os.fork()
    if not child:
        asked = opened.notes or opened.device_memory() or threading.active_count() > 1
        os._exit(1 if asked else 7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    opened.run(decoder_feeds())


def test_what_ranks_are_by_default() -> None:
    several = (["2xcuda"], ["cuda0", "cpu0"], ["cuda0", "cuda0"])
    for devices, kind in ((["cuda0"], THREADS), (["2xcpu"], THREADS), *((each, PROCESSES) for each in several)):
        assert choose_ranks(None, parse_devices(devices), None) == kind
        assert choose_ranks("processes", parse_devices(devices), None) == PROCESSES
    for devices in several:
        with pytest.raises(MisuseError, match=r"threads on CPU devices, or on one GPU, and these are .*: leave"):
            choose_ranks("threads", parse_devices(devices), None)
    with pytest.raises(MisuseError, match="not 'fibers'"):
        choose_ranks("fibers", parse_devices(["cpu0"]), None)
    assert choose_ranks(None, parse_devices(["host3/2xcuda"]), None) == PROCESSES
    with pytest.raises(MisuseError, match=r"on 2 hosts \(host0 to host1\): start them with mpirun -n 3"):
        choose_ranks(None, parse_devices(["host0/2xcpu", "host1/cpu0"]), None)


def test_each_process_sees_its_own_gpu_alone() -> None:
    first, second = parse_devices(["2xcuda"])
    assert visible(second, {})["CUDA_VISIBLE_DEVICES"] == "1"
    assert visible(second, {"CUDA_VISIBLE_DEVICES": "3, GPU-5e1a"})["CUDA_VISIBLE_DEVICES"] == "GPU-5e1a"
    assert visible(first, {}) == {"CUDA_VISIBLE_DEVICES": "0"}
    with pytest.raises(PackageError, match="there is no cuda1: CUDA_VISIBLE_DEVICES names 1 GPUs"):
        visible(second, {"CUDA_VISIBLE_DEVICES": "7"})
    assert visible(parse_devices(["cpu0"])[0], {}) == {}


def test_files_of_nccl_are_removed(tmp_path: Path) -> None:
    path = Path("/dev/shm/nccl-splitc-test")
    path.write_bytes(b"x" * 4096)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert find_mapped(os.getpid(), NCCL) == {str(path)}
    assert find_mapped(os.getpid(), NCCL) == set()
    remove_files({str(path), "/dev/shm/nccl-splitc-gone"})
    assert not path.exists()


def test_rank_that_dies_while_the_session_closes_ends_its_requests(decoder: Path) -> None:
    with ThreadPoolExecutor(1) as pool, open_processes(compile_mode(decoder, "tensor")) as session:
        victim = processes(session)[1]
        stop(victim.pid)
        future = session.submit(decoder_feeds())
        closing = pool.submit(session.close)
        ranks: Any = session._workers
        until(lambda: ranks._closing)
        victim.kill()
        with pytest.raises(SplitcError, match=r"the session is broken: .*rank 1 \(cpu1\) was ended by SIGKILL"):
            future.result(BOUND)
        closing.result(2 * BOUND)


def test_rank_that_hangs_before_its_first_sign_of_life_is_named(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitc.runtime.processes.device_processes.BEGIN", "tests.helpers.stopped_rank")
    monkeypatch.setattr("splitc.runtime.processes.ranks.FIRST_PATIENCE", 1.0)
    with pytest.raises(PackageError, match=r"rank 0 \(cpu0\) hangs: its process gave no sign of life for \d s"):
        open_processes(compile_mode(decoder, "layer"))


def test_what_a_library_prints_in_a_rank_is_no_result(
    decoder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("splitc.runtime.processes.device_processes.BEGIN", "tests.helpers.printing_rank")
    with open_processes(compile_mode(decoder, "one device")) as session:
        session.run(decoder_feeds())
    shown = capfd.readouterr()
    assert shown.out == "" and "printed by a library" in shown.err


def test_caller_that_ends_while_ranks_load_gets_no_traceback() -> None:
    def gone(_: Any) -> None:
        raise BrokenPipeError

    rank, ready = object.__new__(RankProcess), Future[None]()
    rank._control, rank._everyone = SimpleNamespace(send=gone), range(0)  # type: ignore[assignment]
    ready.set_result(None)
    rank._announce(ready)


def test_caller_that_ends_while_ranks_start() -> None:
    """The ranks' process ends silently, also while it waits for the next rank."""
    ours, theirs = socket.socketpair()
    program = f"from splitc.runtime.processes.rank import main; main({theirs.fileno()})"
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, pass_fds=[theirs.fileno()]
        )
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (1, "")
