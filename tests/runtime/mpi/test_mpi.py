"""Sessions whose ranks are processes that MPI has started, by a real mpirun."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from splitc.runtime import Session
from tests.conftest import decoder_feeds
from tests.helpers.packages import compile_mode

ROOT = Path(__file__).resolve().parents[3]
MPIRUN = Path(sys.executable).with_name("mpirun")
pytestmark = pytest.mark.skipif(not MPIRUN.exists(), reason="no MPI from pip (mpich)")

# Opens one session after the other, and writes what came of each: arrays, or an error.
PROGRAM = """
import sys
import numpy as np
from splitc.runtime import Session
from splitc.runtime.errors import SplitcError
from tests.conftest import decoder_feeds
for number, package in enumerate(sys.argv[2:]):
    try:
        with Session(package, threads=1) as session:
            outputs = session.run(decoder_feeds())
            tokens = list(session.generate([5, 17, 33], max_new_tokens=8))
        np.savez(f"{sys.argv[1]}/{number}.npz", tokens=tokens, **outputs)
    except SplitcError as error:
        print(f"{number}: {error}", flush=True)
"""
# Runs requests until it is ended, or raises an error of its own.
ENDLESS = """
import sys
from splitc.runtime import Session
from tests.conftest import decoder_feeds
with Session(sys.argv[1], threads=1) as session:
    session.run(decoder_feeds())
    print("runs", flush=True)
    if sys.argv[2] == "raises":
        raise ValueError("of the user's program")
    while True:
        session.run(decoder_feeds())
"""


def start(ranks: int, *command: object) -> subprocess.Popen[str]:
    """Processes of a program that mpirun has started."""
    return subprocess.Popen(
        [str(each) for each in (MPIRUN, "-n", ranks, *command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def ended(process: subprocess.Popen[str], seconds: float = 60.0) -> tuple[int, str]:
    """How it ended, and what it printed. If it does not end, it is killed, and the test fails."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out + err


def test_outputs_are_those_of_threads_bit_for_bit(decoder: Path, tmp_path: Path) -> None:
    packages = [compile_mode(decoder, mode) for mode in ("layer", "row", "more ranks than heads")]
    broken = shutil.copytree(packages[0], tmp_path / "broken")
    next((broken / "rank1").glob("*.onnx")).unlink()
    code, shown = ended(start(3, sys.executable, "-c", PROGRAM, tmp_path, packages[0], broken, *packages[1:]))
    assert code == 0, shown
    assert "1: rank 1 on" in shown and "is missing" in shown  # and later sessions know nothing of it
    for number, package in zip((0, 2, 3), packages, strict=True):
        with Session(package, threads=1, ranks="threads") as session:
            expected = session.run(decoder_feeds())
            tokens = list(session.generate([5, 17, 33], max_new_tokens=8))
        with np.load(tmp_path / f"{number}.npz") as found:
            assert found["tokens"].tolist() == tokens
            for name, array in expected.items():
                np.testing.assert_array_equal(found[name], array)


def test_commands_run_in_process_0_alone(decoder: Path) -> None:
    script = Path(sys.executable).with_name("splitc")
    code, shown = ended(start(2, script, "generate", compile_mode(decoder, "layer"), "--prompt-ids", "1,2"))
    assert code == 2
    assert shown.count("the package has 3 ranks, and MPI started 2 processes: use mpirun -n 3") == 1
    code, shown = ended(start(3, script, "inspect", compile_mode(decoder, "layer"), "--json"))
    assert code == 0 and shown.count("split_mode") == 1


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_what_ends_one_process_ends_all(decoder: Path, how: str) -> None:
    process = start(3, sys.executable, "-c", ENDLESS, compile_mode(decoder, "row"), how)
    assert process.stdout is not None and process.stdout.readline() == "runs\n"
    if how == "killed":
        os.kill(process_of_rank(1), signal.SIGKILL)
    began = time.monotonic()
    code, shown = ended(process)
    assert code != 0 and time.monotonic() - began < 10
    assert ("of the user's program" in shown) == (how == "raises")


def process_of_rank(rank: int) -> int:
    """The number of the process that has this rank in the job that runs ENDLESS."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if f"PMI_RANK={rank}".encode() in variables and ENDLESS.encode() in command:
            return int(folder.name)
    raise AssertionError("there is no such process")
