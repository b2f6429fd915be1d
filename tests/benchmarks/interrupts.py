"""Signals at random moments: commands that end, and programs that catch Ctrl-C and go on with the same session.

    python -m tests.benchmarks.interrupts --interrupts 3500 --commands 1500

Programs run a request after the other, alone and several at a time, with ranks as threads, as processes and as MPI's
processes. Each answer is compared with what the model gives. Commands (run, check, bench, generate) get SIGINT, SIGTERM
or SIGKILL. Prints how they ended: a wrong answer, a hang (20 s), a crash, a traceback, and what is left (processes,
files in the temporary folder and in /dev/shm) are what must not be.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from subprocess import TimeoutExpired

import numpy as np

from models.llama import build
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.arrays.files import save_arrays
from tests.benchmarks.soak import ROWS, compile_soaked
from tests.conftest import DECODER
from tests.helpers.killed import Killed, codes, kill_after
from tests.helpers.mpi import MPIS, Mpi

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
KINDS = ("threads", "processes", "mpi")
# Seconds without an answer after which a program hangs, and the most between two of its signals.
PATIENCE, BETWEEN = 20.0, 0.06
USES = {
    "run": ["run", "PACKAGE", "--inputs", "INPUTS", "--outputs", "OUTPUTS"],
    "check": ["check", "PACKAGE", "--model", "MODEL"],
    "bench": ["bench", "PACKAGE", "--runs", "20"],
    "generate": ["generate", "DECODER", "--prompt-ids", "5,17,33", "-n", "30"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interrupts", type=int, default=300, help="of programs that go on")
    parser.add_argument("--commands", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--program", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program:
        _go_on(Path(options.program[0]), options.program[1])
        return
    chance = random.Random(options.seed)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="splitc-interrupts-") as scratch:
        model = compile_soaked(Path(scratch), "tensor")
        kinds = KINDS if MPIS else KINDS[:2]
        for kind in kinds:
            _interrupt(model.package, kind, options.interrupts // len(kinds), chance, counts)
            print(f"programs, {kind}: {_said(counts)}", flush=True)
        save_arrays(Path(scratch) / "in.npz", {"ids": np.arange(4)})
        save(build(DECODER), Path(scratch) / "decoder.onnx")
        asked = Request(split_mode="layer", spread=True, memory=("1GiB",))
        compile_model(plan_model(Path(scratch) / "decoder.onnx", ["2xcpu"], asked), Path(scratch) / "decoder")
        for number in range(options.commands):
            _end(model.package, chance, counts, Path(scratch))
            if number % 100 == 99:
                print(f"{number + 1} commands: {_said(counts)}", flush=True)
    print(_said(counts))


def _said(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items()))


def _go_on(package: Path, kind: str) -> None:
    """A program that catches Ctrl-C, and compares what it gets before and after. Prints a line for each."""
    with Session(package, threads=1, in_flight=3, ranks=None if kind == "mpi" else kind) as session:
        expected = [session.run({"ids": _ids(number)})["y"] for number in range(8)]
        print(os.getpid(), flush=True)
        number, interrupted = 0, False
        while True:
            try:
                while True:  # twice, since a signal may come as another one is handled
                    try:
                        if interrupted:
                            interrupted = False
                            print("interrupted", flush=True)
                        number += 1
                        _use(session, number, expected)
                        print("right", flush=True)
                    except KeyboardInterrupt:
                        interrupted = True
                    except ArithmeticError:
                        print("WRONG", flush=True)
            except KeyboardInterrupt:
                interrupted = True


def _ids(number: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return (np.arange(1 + number % 5) * 7 + number) % ROWS


def _use(session: Session, number: int, expected: list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]) -> None:
    """One request, or a few that are under way at the same time. Raises ArithmeticError for a wrong answer."""
    first = number % 8
    if number % 3:
        made = {first: session.run({"ids": _ids(first)})["y"]}
    else:
        futures = {each: session.submit({"ids": _ids(each)}) for each in (first, (first + 3) % 8, (first + 5) % 8)}
        made = {each: future.result()["y"] for each, future in futures.items()}
    for each, array in made.items():
        if array.shape != expected[each].shape or not np.allclose(array, expected[each], rtol=1e-4, atol=1e-5):
            raise ArithmeticError


def _interrupt(package: Path, kind: str, count: int, chance: random.Random, counts: Counter[str]) -> None:
    """Start a program, and send it signals at random moments until there were enough."""
    mpi = MPIS[0] if kind == "mpi" else None
    start = [] if mpi is None else [str(mpi.mpirun), *mpi.options, "-n", "2"]
    own = [sys.executable, "-m", "tests.benchmarks.interrupts", "--program", str(package), kind]
    environment = {**os.environ, **({} if mpi is None else mpi.environment)}
    log = package.with_name(f"{kind}.log")
    with log.open("w") as out:
        process = subprocess.Popen([*start, *own], stdout=out, stderr=subprocess.STDOUT, env=environment)
    sent, target, size, heard = 0, 0, 0, time.monotonic()
    while sent < count and process.poll() is None and time.monotonic() - heard < PATIENCE:
        time.sleep(chance.uniform(0, BETWEEN))
        if (now := log.stat().st_size) > size:
            size, heard = now, time.monotonic()
        if not target and size:
            target = int(log.read_text().split()[0])
        if target:
            os.kill(target, signal.SIGINT)
            sent += 1
    counts[f"signals to programs ({kind})"] += sent
    problem = "" if sent == count else "HANG" if process.poll() is None else f"ENDED with {process.poll()}"
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(PATIENCE)
    except TimeoutExpired:
        problem = f"{problem} HANG at the end"
        process.kill()
    lines = log.read_text().splitlines()[1:]
    counts.update(f"{line} ({kind})" for line in lines if line in ("right", "interrupted", "WRONG"))
    if problem:
        counts[problem] += 1
        print(kind, problem, lines[-30:], flush=True)


def _end(package: Path, chance: random.Random, counts: Counter[str], scratch: Path) -> None:
    """Run a command, which gets a signal at a random moment."""
    use, kind, number = chance.choice(list(USES)), chance.choice(KINDS if MPIS else KINDS[:2]), chance.choice(SIGNALS)
    place = Path(tempfile.mkdtemp(dir=scratch))
    places = {"PACKAGE": package, "MODEL": package.parent / "model.onnx", "INPUTS": scratch / "in.npz"}
    places["DECODER"] = scratch / "decoder"
    command = [{**places, "OUTPUTS": place / "out.npz"}.get(word, word) for word in USES[use]]
    mpi: Mpi | None = MPIS[0] if kind == "mpi" else None
    shared = set(Path("/dev/shm").iterdir())
    try:
        found = kill_after(chance.uniform(0, 2.0), number, [*command, *([] if mpi else ["--ranks", kind])], place, mpi)
    except (TimeoutExpired, AssertionError) as error:
        counts[f"HANG of {use}, {kind}, {number.name}"] += 1
        print(use, kind, number.name, repr(error)[:300], flush=True)
        return
    counts[f"signals to {use}"] += 1
    for problem in _problems(found, number, kind):
        counts[problem] += 1
        print(use, kind, number.name, found, flush=True)
    if number != signal.SIGKILL and (left := set(Path("/dev/shm").iterdir()) - shared):
        # MPICH removes its own as it ends, and we as all have met: before that it leaves them.
        counts["left by MPICH" if all("mpich" in path.name for path in left) else "LEFT in /dev/shm"] += 1


def _problems(found: Killed, number: signal.Signals, kind: str) -> list[str]:
    problems = []
    if kind != "mpi" and found.code not in codes(number):
        problems.append(f"ENDED with {found.code}")
    if "Traceback" in found.errors:
        problems.append("TRACEBACK")
    if found.temporary and number != signal.SIGKILL:
        problems.append("LEFT in the temporary folder")
    return problems


if __name__ == "__main__":
    main()
