"""Sessions whose ranks are processes that MPI has started, by a real mpirun."""

from __future__ import annotations

import io
import itertools
import json
import shutil
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import psutil
import pytest

from splitc.runtime import Session
from splitc.runtime.hardware.devices import parse_devices
from splitc.runtime.hardware.gpus import GpuIdentity
from splitc.runtime.hardware.machine import known_machine
from splitc.runtime.hardware.profiles import parse_link
from splitc.runtime.ipc.mapped_files import MPI, find_mapped
from splitc.runtime.mpi import life
from splitc.runtime.mpi.hosts import Finding, find_contradiction, why_not_placed
from tests.conftest import decoder_feeds, until
from tests.helpers import fake_gpu_sessions
from tests.helpers.mpi import MPIS, Mpi, TwoHosts, ended, signal_rank, why_no_hosts
from tests.helpers.mpi_fake_gpus import SESSIONS
from tests.helpers.mpi_requests import PROMPT
from tests.helpers.packages import compile_mode

if not MPIS:
    pytest.skip("no MPI from pip (mpich)", allow_module_level=True)
each_mpi = pytest.mark.parametrize("mpi", MPIS, ids=lambda mpi: mpi.name)
two_hosts = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
REQUESTS = (sys.executable, "-m", "tests.helpers.mpi_requests")

# What ranks exchange is then too much for MPI to send at once.
SIZE = {"batch": 4, "new": 256}

# Runs requests until it is ended, or raises an error of its own. It may have less patience, for a shorter test.
ENDLESS = """
import sys
from splitc.runtime import Session
from splitc.runtime.mpi import life, ranks
if sys.argv[2] == "impatient":
    life.PATIENCE = ranks.SILENCE = 2.5
with Session(sys.argv[1], threads=1) as session:
    list(session.generate([1], max_new_tokens=1))
    print("runs", flush=True)
    if sys.argv[2] == "raises":
        raise ValueError("of the user's program")
    while True:
        list(session.generate([1], max_new_tokens=1))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    feeds: dict[str, Any] = dict(decoder_feeds(**SIZE))
    np.savez(tmp_path / "feeds.npz", **feeds)
    return tmp_path


def check(package: Path, written: Path) -> None:
    """Check that a package's outputs equal those of threads, bit for bit."""
    with Session(package, threads=1, ranks="threads") as session:
        expected = session.run(decoder_feeds(**SIZE))
        tokens = list(session.generate(PROMPT, max_new_tokens=8))
    with np.load(written) as found:
        assert found["tokens"].tolist() == tokens
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)


def test_sessions_on_gpus_release_what_connects_them(decoder: Path, tmp_path: Path) -> None:
    """Their processes go on: NCCL's connections and memory opened by others would leak, or be freed at any time."""
    packages = [fake_gpu_sessions.package(decoder, mode, 2) for mode in ("layer", "tensor")]
    program = (sys.executable, "-m", "tests.helpers.mpi_fake_gpus")
    code, shown = ended(MPIS[0].start(2, *program, tmp_path, *packages))
    assert code == 0, shown
    assert [line for line in shown.splitlines() if line.startswith("session")] == [
        f"session {number} ended with 0 communicators and files []" for number in range(SESSIONS)
    ] * 2
    for package in packages:
        with Session(package, devices=["2xcpu"]) as session, np.load(tmp_path / f"{package.name}.npz") as found:
            for name, array in session.run(decoder_feeds()).items():
                np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)


def test_outputs_are_those_of_threads_bit_for_bit(decoder: Path, folder: Path) -> None:
    packages = [compile_mode(decoder, mode) for mode in ("layer", "row", "tensor")]
    broken = shutil.copytree(packages[0], folder / "broken")
    next((broken / "rank1").glob("*.onnx")).unlink()
    code, shown = ended(MPIS[0].start(2, *REQUESTS, folder, packages[0], broken, *packages[1:]))
    assert code == 0, shown
    assert "1: rank 1 on" in shown and "this host lacks" in shown  # and later sessions know nothing of it
    for number, package in zip((0, 2, 3), packages, strict=True):
        check(package, folder / f"{number}.npz")


@two_hosts
def test_two_hosts_that_have_their_own_ranks_alone(decoder: Path, folder: Path) -> None:
    """With the other MPI, if there is one."""
    packages = [compile_mode(decoder, mode) for mode in ("layer", "row", "tensor")]
    theirs = folder / "theirs"
    for package in packages:
        shutil.copytree(package, theirs / package.name, ignore=shutil.ignore_patterns("rank0"))
    broken = shutil.copytree(packages[0], folder / "broken")
    (folder / "nothing").mkdir()
    mounts = {broken: folder / "nothing", **{package: theirs / package.name for package in packages}}
    code, shown = ended(MPIS[-1].start(2, *REQUESTS, folder, *packages, broken, hosts=TwoHosts(1, mounts)))
    assert code == 0, shown
    for number, package in enumerate(packages):
        check(package, folder / f"{number}.npz")
    assert f"3: rank 1 on node1: this host lacks {broken}/manifest.json: copy" in shown


def test_groups_have_lanes_of_their_own(decoder: Path, folder: Path) -> None:
    """Stages or copies are on two hosts, where the machine can be two, and each group is inside a host.

    Requests of two rows are divided, tokens come from one group; a session after another one knows nothing of it.
    """
    packages = [compile_mode(decoder, mode) for mode in ("tensor in layers", "tensor in groups")]
    hosts = None if why_no_hosts() else TwoHosts(2)
    code, shown = ended(MPIS[0].start(4, *REQUESTS, folder, *packages, hosts=hosts))
    assert code == 0, shown
    for number, package in enumerate(packages):
        check(package, folder / f"{number}.npz")


@two_hosts
def test_times_of_two_hosts_are_by_one_clock(decoder: Path, tmp_path: Path) -> None:
    """The second host's is a million seconds ahead."""
    script, trace = Path(sys.executable).with_name("splitc"), tmp_path / "trace.json"
    asked = ("--runs", 8, "--no-memory", "--json", "--trace", trace)
    started = MPIS[0].start(2, script, "bench", compile_mode(decoder, "layer"), *asked, hosts=TwoHosts(1))
    code, shown = ended(started)
    assert code == 0, shown
    assert 0 < json.loads(shown[shown.index("{") :])["time"]["latency"]["median"] < 60
    steps = [each for each in json.loads(trace.read_text())["traceEvents"] if each["ph"] == "X"]
    assert all(0 <= each["ts"] < 60e6 for each in steps)
    runs = [each for each in steps if each["cat"] == "run" and each["args"]["request"] == 7]
    ends = {each["tid"]: each["ts"] + each["dur"] for each in runs}
    assert ends[0] < ends[1], "each waits for what the one before sends"


def test_commands_run_in_process_0_alone(package: Path) -> None:
    script = Path(sys.executable).with_name("splitc")
    code, shown = ended(MPIS[0].start(2, script, "generate", package, "--prompt-ids", "1,2"))
    assert code == 2
    assert shown.count("the package has 3 ranks, and MPI started 2 processes: use mpirun -n 3") == 1


# `splitc devices --measure`, where nothing else is measured.
MEASURED = """
import sys
from splitc.runtime.__main__ import main
from splitc.runtime.hardware.machine import Machine
from splitc.runtime.tools import link_times
link_times.measure_machine = lambda devices: Machine()
link_times.WARMUP, link_times.RUNS = 1, 5
sys.argv = ["splitc", "devices", "--measure"]
main()
"""


@two_hosts
def test_link_between_hosts_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, shown = ended(MPIS[0].start(2, sys.executable, "-c", MEASURED, hosts=TwoHosts(1)))
    assert code == 0, shown
    link = known_machine().interconnect
    assert link is not None and 1e-6 < link.latency < 1 and link.per_byte > 0
    shown_link = parse_link(shown.rpartition("--interconnect ")[2].strip().rstrip(")"))
    assert shown_link.latency == pytest.approx(link.latency, rel=1e-3)


@pytest.mark.skipif(len(MPIS) < 2, reason="needs two MPIs: make test installs them")
def test_mpirun_of_another_mpi_is_refused(tmp_path: Path) -> None:
    """Each process is alone to Open MPI then, which leaves files when it is killed: not in /dev/shm here."""
    own = {"OMPI_MCA_btl_sm_backing_directory": str(tmp_path)}
    library = replace(MPIS[0], environment={**MPIS[1].environment, **own})
    code, shown = ended(library.start(2, Path(sys.executable).with_name("splitc"), "devices"))
    assert code == 2 and "2 processes were started, and MPI (Open MPI" in shown and "finds this one alone" in shown


def test_error_of_the_program_ends_all_processes(decoder: Path) -> None:
    process = MPIS[-1].start(2, sys.executable, "-c", ENDLESS, compile_mode(decoder, "tensor"), "raises")
    code, shown = ended(process)
    assert code != 0 and "of the user's program" in shown


@two_hosts
@pytest.mark.parametrize(
    ("mpi", "number"),
    [*((mpi, signal.SIGKILL) for mpi in MPIS), (MPIS[0], signal.SIGSTOP)],
    ids=lambda each: getattr(each, "name", each),
)
def test_process_that_dies_or_hangs_on_another_host_ends_all(decoder: Path, mpi: Mpi, number: int) -> None:
    command = (sys.executable, "-c", ENDLESS, compile_mode(decoder, "tensor"), "impatient")
    process = mpi.start(2, *command, hosts=TwoHosts(1))
    assert process.stdout is not None and process.stdout.readline() == "runs\n"
    signal_rank(mpi, process, 1, number)
    began = time.monotonic()
    code, shown = ended(process)
    spared = 0 if number == signal.SIGKILL else life.PATIENCE - 2.5  # a hang is noticed so much sooner than by default
    assert code != 0 and time.monotonic() - began < 10 - spared
    assert number == signal.SIGKILL or "rank 1 (cpu1 on node1) hangs" in shown


# Runs requests for some seconds, with less patience, for a shorter test.
STOPPED = """
import sys, time
from splitc.runtime import Session
from splitc.runtime.mpi import life, ranks
life.PATIENCE = ranks.SILENCE = 2.5
with Session(sys.argv[1], threads=1) as session:
    list(session.generate([1], max_new_tokens=1))
    print("runs", flush=True)
    end = time.monotonic() + 6
    while time.monotonic() < end:
        list(session.generate([1], max_new_tokens=1))
        time.sleep(0.1)
"""


def test_stop_of_all_ranks_does_not_break_the_session(decoder: Path) -> None:
    process = MPIS[0].start(2, sys.executable, "-c", STOPPED, compile_mode(decoder, "tensor"))
    assert process.stdout is not None and process.stdout.readline() == "runs\n"
    for rank in range(2):
        signal_rank(MPIS[0], process, rank, signal.SIGSTOP)
    time.sleep(4)
    for rank in range(2):
        signal_rank(MPIS[0], process, rank, signal.SIGCONT)
    assert ended(process) == (0, "")


@each_mpi
def test_job_that_is_cancelled_ends_at_once_and_leaves_nothing(decoder: Path, mpi: Mpi) -> None:
    before = set(Path("/dev/shm").iterdir())
    process = mpi.start(2, sys.executable, "-c", ENDLESS, compile_mode(decoder, "tensor"), "")
    assert process.stdout is not None and process.stdout.readline() == "runs\n"
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    code, _ = ended(process)
    assert code != 0 and time.monotonic() - began < 5
    # Jobs of other tests come and go.
    until(lambda: not {each for each in Path("/dev/shm").iterdir() if "mpi" in each.name} - before)


# As `splitc`, which lets SIGTERM end a program like Ctrl-C.
TERMINABLE = "from splitc.runtime.threads.interrupts import handle_signals\nhandle_signals()\n"
# Opens no session: its ranks wait for one.
IDLE = """
import time
from splitc.runtime.mpi.first_process import begin
begin()
print("runs", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("mpi", "program"), [(MPIS[0], IDLE), (MPIS[-1], ENDLESS)], ids=["idle", "at work"])
def test_job_that_is_terminated_ends_without_a_word(decoder: Path, mpi: Mpi, program: str) -> None:
    """mpirun passes the signal on to all processes: process 0 ends its program, and the ranks."""
    process = mpi.start(2, sys.executable, "-c", TERMINABLE + program, compile_mode(decoder, "tensor"), "")
    assert process.stdout is not None and process.stdout.readline() == "runs\n"
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    code, shown = ended(process)
    assert code != 0 and time.monotonic() - began < 5
    # mpirun's own library for events warns of a pipe that ended meanwhile, rarely.
    assert [line for line in shown.splitlines() if line and not line.startswith("[warn] Epoll")] == []


# A command, whose process 1 comes to the others late.
LATE = """
import os, sys, time
from splitc.runtime.__main__ import main
from splitc.runtime.mpi import first_process
find, late = first_process.find_world, os.environ[sys.argv.pop(1)] == "1"
def find_late():
    os.write(1, b"begins\\n")  # at once: print writes the line's end for itself where Python buffers nothing
    time.sleep(late)
    return find()
first_process.find_world = find_late
sys.argv[0] = "splitc"
main()
"""


@pytest.mark.parametrize(("mpi", "number"), [(MPIS[0], signal.SIGTERM), (MPIS[-1], signal.SIGINT)])
def test_signal_waits_until_all_processes_have_met(mpi: Mpi, number: int, decoder: Path) -> None:
    """If a process ended before, the others would wait for it, or MPI's files would stay."""
    command = ("bench", compile_mode(decoder, "tensor"), "--runs", 1_000_000)
    process = mpi.start(2, sys.executable, "-c", LATE, mpi.rank_variable, *command)
    assert process.stdout is not None and [process.stdout.readline() for _ in range(2)] == ["begins\n"] * 2
    time.sleep(0.5)
    children = psutil.Process(process.pid).children(recursive=True)
    opened = set[str]().union(*(find_mapped(child.pid, MPI) for child in children))
    process.send_signal(number)
    code, shown = ended(process, 20)
    assert code != 0 and "Traceback" not in shown
    assert not [file for file in opened if Path(file).exists()]


def test_rank_that_alone_is_told_to_end_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ended_all, shown = threading.Event(), io.StringIO()

    def abort() -> None:
        rank._ended.set()
        ended_all.set()

    monkeypatch.setattr(life, "BEAT", 0.01)
    monkeypatch.setattr(life, "PATIENCE", 0.2)
    monkeypatch.setattr(life, "abort_all", abort)
    monkeypatch.setattr(sys, "stderr", shown)
    heard = SimpleNamespace(rank=1, size=2, Isend=lambda *_: MagicMock(), Recv=lambda *_: None)
    heard.Iprobe = MagicMock(side_effect=itertools.cycle([True, False]))  # process 0 is well
    rank = life.Life(heard)
    assert not ended_all.wait(0.4)
    rank.end_soon()
    assert ended_all.wait(10)
    assert shown.getvalue() == "error: rank 1 was told to end (SIGTERM), and the session's process (0) goes on\n"


def test_ranks_of_a_planned_host_that_are_on_several_are_refused() -> None:
    devices = parse_devices(["host0/2xcpu", "host1/2xcpu"])
    assert why_not_placed(devices, (0, 0, 1, 1), ("a", "a", "b", "b")) is None
    assert why_not_placed(devices, (0, 0, 0, 0), ("a",) * 4) is None
    why = why_not_placed(devices, (0, 1, 0, 1), ("a", "b", "a", "b"))
    assert why is not None and "ranks 0 and 1 on one host (host0)" in why and "rank 1 on b" in why
    assert "(-d): host0/cpu0,host1/cpu1,host0/cpu0,host1/cpu1" in why


def found_on(host: str, machine: int, library: str = "onnxruntime 1.31", needed: int = 0) -> Finding:
    return Finding(host, machine, library, GpuIdentity("01:00", "G", 2**30), needed)


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (found_on("b", 1, "onnxruntime 1.30"), "rank 1 on b has onnxruntime 1.30, and rank 0 on a onnxruntime 1.31"),
        (found_on("a", 0), "ranks 0 and 1 on a have the same GPU"),
        (found_on("b", 1, needed=2**31), "rank 1 on b needs 2"),
        (found_on("b", 1), None),
    ],
)
def test_hosts_that_do_not_fit_are_named(second: Finding, why: str | None) -> None:
    found = find_contradiction([found_on("a", 0), second])
    assert found is None if why is None else found is not None and why in found


# Something is to be done at its end before there is a session, which stays open. A library prints in a rank's process.
OPEN = """
import os, sys, tempfile
folder = tempfile.TemporaryDirectory()
from splitc.runtime import Session
from splitc.runtime.mpi import rank
run_rank = rank.run_rank
def print_and_run(*given):
    os.write(1, b"printed by a library")
    run_rank(*given)
rank.run_rank = print_and_run
session = Session(sys.argv[1], threads=1)
list(session.generate([1], max_new_tokens=1))
print("leaving", flush=True)
"""


TWO = """
import sys, threading
from splitc.runtime import Session
from splitc.runtime.errors import MisuseError

def run():
    try:
        with Session(sys.argv[1], threads=1) as session:
            assert gate.wait() >= 0
            print(len(list(session.generate([1], max_new_tokens=2))))
    except MisuseError as error:
        gate.wait()
        print(str(error).split(",")[0])

gate = threading.Barrier(2)
both = [threading.Thread(target=run) for _ in range(2)]
for thread in both:
    thread.start()
for thread in both:
    thread.join()
with Session(sys.argv[1], threads=1) as session:
    print(len(list(session.generate([1], max_new_tokens=2))))
"""


def test_a_second_open_session_is_refused(decoder: Path) -> None:
    """The first one stays usable, and the next one is opened when it is closed."""
    process = MPIS[-1].start(2, sys.executable, "-c", TWO, compile_mode(decoder, "tensor"))
    code, said = ended(process)
    assert (code, sorted(said.split("\n"))) == (0, ["", "2", "2", "a session of this program is open"])


def test_program_ends_with_an_open_session(decoder: Path) -> None:
    """It is closed before the ranks are told to leave: they left it, and waited to be told again.

    What a library prints in a rank is no result.
    """
    process = MPIS[0].start(2, sys.executable, "-c", OPEN, compile_mode(decoder, "tensor"))
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "leaving\n")
    assert "printed by a library" in err
