"""Signals at random moments: nothing is left behind, existing files stay whole, and the next command works."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splitc.runtime.arrays.files import load_arrays, save_arrays
from splitc.runtime.engines.kinds import find_kind
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.package.verification import verify_files
from tests.conftest import decoder_feeds, listen_to_interrupts, run_whole
from tests.helpers.command import splitc
from tests.helpers.fuzz import MORE, seeds
from tests.helpers.killed import Killed, codes, kill_after
from tests.helpers.mpi import MPIS, ROOT, Mpi
from tests.helpers.packages import compile_mode
from tests.helpers.sweep import REQUESTS, sized

pytestmark = [pytest.mark.fuzz, pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")]

SIGNAL_AT = Path(__file__).with_name("helpers") / "signal_at.py"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
MODES = {
    **{mode: ["-d", "2xcpu", "--split-mode", mode] for mode in ("layer", "tensor", "auto")},
    "row": ["-d", "2xcpu", "--split-mode", "row", "--row-min", "1"],
    "engines": ["-d", "2xcuda", "--split-mode", "layer", "--engine", "tensorrt-rtx"],
}
USES = {
    "run": ["run", "PACKAGE", "--inputs", "INPUTS", "--outputs", "OUTPUTS"],
    "check": ["check", "PACKAGE", "--model", "MODEL"],
    "bench": ["bench", "PACKAGE", "--runs", "30", "--trace", "OUTPUTS"],
    "generate": ["generate", "PACKAGE", "--prompt-ids", "5,17,33", "-n", "30"],
}


# A command that gets a signal while it frees an object, or during an import.
PROGRAM = """
import os, sys, time
from splitc.runtime.__main__ import main
from splitc.runtime.cli.app import app
class Freed:
    def __del__(self):
        os.kill(os.getpid(), {number})
        time.sleep(0)
def freed():
    last = Freed()
    del last
    time.sleep(30)
def imported():
    import getting_a_signal
    time.sleep(30)
app.command("begin")({what})
sys.argv = ["splitc", "begin"]
main()
"""
MODULE = """
import os, time
try:
    os.kill(os.getpid(), {number})
    time.sleep(0)
except BaseException as error:  # as the C++ of a module does, where it does not crash
    raise ImportError("initialization failed") from error
print("imported")
"""
# The seconds of undisturbed commands, by kind, and about those of each, which are enough for a case or two.
_known: dict[str, float] = {}
USUAL = {"compile": 1.5}


def moment(kind: str, seed: int, command: Sequence[object], place: Path, mpi: Mpi | None = None) -> tuple[int, float]:
    """A signal, and the seconds until it comes: before the command would end, or a little after."""
    if MORE == 1:
        _known.setdefault(kind, USUAL.get(kind, 0.7))
    if kind not in _known:
        found = kill_after(None, 0, command, place, mpi)
        assert found.code == 0, found.errors
        _known[kind] = found.seconds
    random = np.random.default_rng([seed, zlib.crc32(kind.encode())])
    return SIGNALS[random.integers(len(SIGNALS))], random.uniform(0, 1.1 * _known[kind])


def choice(seed: int, *sets: Iterable[Any]) -> tuple[Any, ...]:
    """One of all combinations. Successive seeds give different ones."""
    every = list(product(*sets))
    return every[7 * seed % len(every)]


def check_whole(package: Path) -> None:
    verify_files(package, read_manifest(package).files)


def check_message(number: int, found: Killed) -> None:
    assert "Traceback" not in found.errors
    if number == signal.SIGINT and found.code:
        assert found.errors in ("", "error: interrupted\n") or "warning" in found.errors


# A command that gets a signal right after the main thread has started its thread of this number.
STARTING = """
import os, sys, threading, time
from splitc.runtime.__main__ import main
start, left = threading.Thread.start, [{number}]
def started(thread):
    start(thread)
    if threading.current_thread() is threading.main_thread():
        left[0] -= 1
        if left[0] == -1:
            os.kill(os.getpid(), {signal})
            time.sleep(0)
threading.Thread.start = started
sys.argv = ["splitc", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("number", [0, 1])
def test_signal_right_after_a_thread_is_started(number: int, decoder: Path, package: Path) -> None:
    """The first thread is a pool's: Python once waited for it at its end. The next one is a rank's."""
    program = STARTING.format(number=number, signal=int(signal.SIGINT))
    command = [sys.executable, "-c", program, "check", str(package), "--model", str(decoder), "--no-memory"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stderr.splitlines()[-1]) == (130, "error: interrupted")


@pytest.mark.parametrize("seed", seeds(1, 2))
def test_ended_compile_leaves_nothing_half_written(seed: int, decoder: Path, package: Path, tmp_path: Path) -> None:
    mode, force = choice(seed, MODES, (False, True))
    if mode == "engines" and not find_kind("tensorrt-rtx").is_installed:
        pytest.skip("TensorRT-RTX is not installed")
    target = tmp_path / "p"
    command = ["compile", decoder, *MODES[mode], "--memory", "1GiB", "-o", target, *(["--force"] if force else [])]
    number, seconds = moment("compile", seed, command, tmp_path)
    shutil.rmtree(target, ignore_errors=True)
    if force:
        shutil.copytree(package, target)
    found = kill_after(seconds, number, command, tmp_path)
    assert found.code in codes(number), found
    check_message(number, found)
    if force or target.exists():
        check_whole(target)
    if number != signal.SIGKILL:
        assert {path.name for path in tmp_path.iterdir()} <= {"temporary", "p"}
        assert found.temporary == []
    if not force:
        shutil.rmtree(target, ignore_errors=True)
    splitc(*command)
    assert {path.name for path in tmp_path.iterdir()} == {"temporary", "p"}
    check_whole(target)


@pytest.mark.parametrize("seed", seeds(1, 2))
def test_ended_command_leaves_no_process_or_file(seed: int, decoder: Path, tmp_path: Path) -> None:
    use, ranks = choice(seed, USES, ("processes", "threads"))
    outputs = tmp_path / "outputs"
    save_arrays(tmp_path / "inputs.npz", decoder_feeds())
    places = {
        "PACKAGE": compile_mode(decoder, "tensor"),
        "MODEL": decoder,
        "INPUTS": tmp_path / "inputs.npz",
        "OUTPUTS": outputs,
    }
    command = [*(places.get(word, word) for word in USES[use]), "--ranks", ranks]
    number, seconds = moment(f"{use} {ranks}", seed, command, tmp_path)
    outputs.unlink(missing_ok=True)
    found = kill_after(seconds, number, command, tmp_path)
    assert found.code in codes(number), found
    check_message(number, found)
    if outputs.exists() and use == "run":
        load_arrays(outputs)
    if number != signal.SIGKILL:
        assert {path.name for path in tmp_path.iterdir()} <= {"temporary", "inputs.npz", "outputs"}
        assert found.temporary == []


# With 0 a few calls and returns get a signal, with N one of N. With 1 all of them do, which takes hours.
SWEEP = int(os.environ.get("SPLITC_SWEEP", "0"))


@pytest.mark.parametrize("seed", seeds(1, 2))
def test_signal_at_a_call_or_return_of_a_command(seed: int, decoder: Path, package: Path, tmp_path: Path) -> None:
    """Random moments miss intervals of a microsecond."""
    use, ranks, number = choice(seed, USES, ("threads", "processes"), (signal.SIGINT, signal.SIGTERM))
    save_arrays(tmp_path / "inputs.npz", decoder_feeds())
    places = {"PACKAGE": package, "MODEL": decoder, "INPUTS": tmp_path / "inputs.npz", "OUTPUTS": tmp_path / "outputs"}
    command = [*(places.get(word, word) for word in USES[use]), "--ranks", ranks]

    def signalled(at: int) -> Killed:
        program = (SIGNAL_AT, at, number.name, tmp_path / "sites.json")
        return kill_after(None, 0, command, tmp_path, program=program)

    assert signalled(0).code == 0
    sites = sorted(json.loads((tmp_path / "sites.json").read_text()).values())
    step = SWEEP or len(sites)
    for at in sites[(seed + 1) * 7919 % step :: step]:
        found = signalled(at)
        assert found.code in codes(number), (at, found)
        check_message(number, found)
        assert found.seconds < 20, (at, found)
        assert found.temporary == [], (at, found)


@pytest.mark.parametrize(
    ("use", "ranks", "every"),
    [
        ("run", "threads", 400),
        ("generate", "processes", 1500),
        ("session", "threads", 3000),
        ("session", "processes", 20_000),
    ],
)
def test_signal_at_a_call_or_return_of_a_program_that_goes_on(
    use: str, ranks: str, every: int, decoder: Path, tmp_path: Path
) -> None:
    package, step = compile_mode(decoder, "tensor"), SWEEP or every // MORE
    expected = {str(number): run_whole(decoder, sized(number))["logits"] for number in range(REQUESTS)}
    save_arrays(tmp_path / "expected.npz", expected)
    program = [sys.executable, "-m", "tests.helpers.sweep", package, tmp_path / "expected.npz", use, ranks]
    found = subprocess.run(
        [str(each) for each in (*program, "--every", step, "--first", SWEEP or step // 2)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        preexec_fn=listen_to_interrupts,
    )
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.skipif(not MPIS, reason="there is no MPI")
@pytest.mark.parametrize("seed", seeds(1, 2))
def test_ended_command_under_mpi_leaves_no_process(seed: int, decoder: Path, package: Path, tmp_path: Path) -> None:
    use, mpi = choice(seed, USES, MPIS)
    save_arrays(tmp_path / "inputs.npz", decoder_feeds())
    places = {"PACKAGE": package, "MODEL": decoder, "INPUTS": tmp_path / "inputs.npz", "OUTPUTS": tmp_path / "outputs"}
    command = [places.get(word, word) for word in USES[use]]
    number, seconds = moment(f"{use} {mpi.name}", seed, command, tmp_path, mpi)
    found = kill_after(seconds, number, command, tmp_path, mpi)
    assert "Traceback" not in found.errors
    if (tmp_path / "outputs").exists() and use == "run":
        load_arrays(tmp_path / "outputs")


ENDS = pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])


def run_program(what: str, number: int, place: Path) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", PROGRAM.format(number=int(number), what=what)]
    return subprocess.run(
        program, capture_output=True, text=True, timeout=60, cwd=place, preexec_fn=listen_to_interrupts
    )


@ENDS
def test_signal_while_an_object_is_freed(number: int, code: int, tmp_path: Path) -> None:
    """Python drops an exception there, and would continue."""
    found = run_program("freed", number, tmp_path)
    assert found.returncode == code
    assert found.stderr in ("", "error: interrupted\n")


@ENDS
def test_signal_in_an_import(number: int, code: int, tmp_path: Path) -> None:
    """The C++ code of some modules (onnx, onnxruntime) crashes if an exception is raised in it."""
    (tmp_path / "getting_a_signal.py").write_text(MODULE.format(number=int(number)))
    found = run_program("imported", number, tmp_path)
    assert found.returncode == code
    assert found.stdout == "imported\n"
    assert found.stderr in ("", "error: interrupted\n")


@pytest.mark.parametrize("seed", seeds(1, 2))
def test_two_compiles_to_one_place(seed: int, decoder: Path, tmp_path: Path) -> None:
    """One of them is complete; the other one is refused, or follows it."""
    random, target = np.random.default_rng(seed), tmp_path / "p"
    command: Sequence[object] = ["compile", decoder, *MODES["layer"], "-o", target, "--force"]
    results = []

    def compile_(delay: float) -> None:
        threading.Event().wait(delay)
        results.append(kill_after(None, 0, command, tmp_path))

    threads = [threading.Thread(target=compile_, args=[delay]) for delay in (0.0, random.uniform(0, 0.3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(each.code for each in results) in ([0, 0], [0, 2])
    assert all(each.code == 0 or "another process is writing" in each.errors for each in results)
    assert {path.name for path in tmp_path.iterdir()} == {"temporary", "p"}
    check_whole(target)
    splitc("inspect", target)
