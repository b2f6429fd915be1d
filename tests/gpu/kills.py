"""Kills and stops ranks at random moments: each time an error names the rank, and nothing is left behind.

    python -m tests.gpu.kills --devices 2xcuda --kills 50
    python -m tests.gpu.kills --devices 2xcpu --kills 20      # the same, without a GPU

A small decoder generates in tensor mode, with ranks as processes. In some rounds the rank is killed while the session
loads, in some it is stopped, as if it hung. The error must come within 10 seconds, or 22 if the rank may not have sent
its first heartbeat. Then there must be no process of the ranks, no new file in /dev/shm, and no more descriptors and
threads than before. Needs /proc, and that no other program uses NCCL at the same time.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import onnx_ir as ir

from models.llama import Size
from models.llama_fused import build
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.errors import SplitcError
from splitc.runtime.hardware.devices import parse_devices
from splitc.runtime.processes.reader import LOOK
from splitc.runtime.processes.remote import FIRST_PATIENCE

# Seconds within which an error must come, the same while a session loads, and the longest wait for it.
BOUND, LOADING_BOUND, PATIENCE = 10.0, FIRST_PATIENCE + 2, 30.0
# Seconds after loading within which a rank is killed.
RUNNING = 1.0
# The shares of rounds in which a rank is killed while loading, and in which it is stopped.
LOADING_PART, STOPPED_PART = 0.25, 0.25
# The capacity of a sequence.
ROOM = 64


@dataclass(frozen=True)
class Round:
    """The rank, its signal, and the seconds after the session began to load, or to generate."""

    rank: int
    signal: signal.Signals
    loading: bool
    delay: float

    def __str__(self) -> str:
        return f"{self.signal.name} {'while loading' if self.loading else 'while running'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="2xcuda")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--mode", default="tensor")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random = np.random.default_rng(options.seed)
    ranks = len(parse_devices([options.devices]))
    seconds: dict[str, list[float]] = defaultdict(list)
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="splitc-kills-") as folder:
        package = _compile(Path(folder), options)
        loading = _run_whole(package)
        before = _left_over()
        print(f"{options.devices}: loads in {loading:.1f} s", flush=True)
        for number in range(options.kills):
            each = _draw(random, ranks, loading)
            took, found = _try(package, each, before)
            seconds[str(each)].append(took)
            problems += [f"round {number}, {each}, rank {each.rank}: {problem}" for problem in found]
            print(f"{number}: rank {each.rank}, {each}: {took:.2f} s {'; '.join(found)}", flush=True)
    _report(seconds, problems)


def _compile(folder: Path, options: argparse.Namespace) -> Path:
    dtype = ir.DataType.FLOAT if "cpu" in options.devices else ir.DataType.FLOAT16
    size = Size(layers=2, hidden=512, heads=8, kv_heads=4, feed_forward=1024, vocabulary=1000, dtype=dtype)
    save(build(size), folder / "model.onnx")
    request = Request(split_mode=options.mode, engine="onnxruntime", spread=True)
    plan = plan_model(folder / "model.onnx", [options.devices], request)
    compile_model(plan, folder / "package", verify=False)
    return folder / "package"


def _draw(random: np.random.Generator, ranks: int, loading: float) -> Round:
    """A random round. `loading` are the seconds that a session takes to load."""
    in_loading = bool(random.random() < LOADING_PART)
    delay = random.uniform(0, loading if in_loading else RUNNING)
    how = signal.SIGSTOP if random.random() < STOPPED_PART else signal.SIGKILL
    return Round(int(random.integers(ranks)), how, in_loading, float(delay))


def _try(package: Path, each: Round, before: Mapping[str, int]) -> tuple[float, list[str]]:
    """The seconds from the signal to the error, and what was wrong."""
    others = _children()
    caller = Caller(package)
    caller.start()
    if not each.loading:
        caller.loaded.wait(PATIENCE)
    time.sleep(each.delay)
    while len(ours := [child for child in _children() if child not in others]) <= each.rank:
        time.sleep(1e-3)  # the process has not started yet
    sent = time.monotonic()
    os.kill(ours[each.rank], each.signal)
    caller.join(PATIENCE)
    problems = []
    if caller.is_alive():
        problems.append(f"no end after {PATIENCE:.0f} s")
        for child in ours:
            os.kill(child, signal.SIGKILL)
        caller.join()
    took = caller.ended - sent
    if took > (LOADING_BOUND if each.loading else BOUND):
        problems.append(f"the error came after {took:.1f} s")
    if f"rank {each.rank} " not in caller.error:
        problems.append(f"the error does not name the rank: {caller.error}")
    time.sleep(2 * LOOK)  # who watches the ranks of all sessions looks so often whether there are any
    left = {name: many - before[name] for name, many in _left_over().items()}
    return took, [*problems, *(f"{count} {name} left" for name, count in left.items() if count > 0)]


class Caller(threading.Thread):
    """Open a session and generate, again and again, until there is an error."""

    def __init__(self, package: Path) -> None:
        super().__init__()
        self._package = package
        self.error, self.ended = "", 0.0
        self.loaded = threading.Event()

    def run(self) -> None:
        try:
            session = Session(self._package, verify="never", ranks="processes")
        except SplitcError as error:
            self._end(error)
            return
        self.loaded.set()
        try:
            while True:
                _generate(session)
        except SplitcError as error:
            self._end(error)
        finally:
            session.close()

    def _end(self, error: BaseException) -> None:
        self.error, self.ended = str(error), time.monotonic()


def _generate(session: Session) -> None:
    """Run a prompt and some tokens in a new sequence."""
    with session.start(capacity=ROOM) as sequence:
        for place in range(4, ROOM):
            first = 0 if place == 4 else place - 1
            mask = (np.arange(ROOM) < place).astype(np.int64)[None]
            sequence.run({"input_ids": np.ones((1, place - first), np.int64), "attention_mask": mask})


def _run_whole(package: Path) -> float:
    """Generate in an undisturbed session, and return the seconds that it took to load."""
    start = time.monotonic()
    with Session(package, verify="never", ranks="processes") as session:
        loading = time.monotonic() - start
        _generate(session)
    return loading


def _left_over() -> dict[str, int]:
    """The numbers of what a session may leave behind."""
    gc.collect()
    return {
        "processes": len(_children()),
        "files in /dev/shm": len(list(Path("/dev/shm").iterdir())),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
    }


def _children() -> list[int]:
    """This process's children in the order of their starts, zombies included."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == os.getpid():
            found.append((int(fields[19]), int(path.parent.name)))
    return [child for _, child in sorted(found)]


def _report(seconds: Mapping[str, list[float]], problems: list[str]) -> None:
    for name, each in sorted(seconds.items()):
        worst = np.percentile(each, 90)
        print(f"{name}: {len(each)}, median {median(each):.2f} s, 90 % {worst:.2f} s, most {max(each):.2f} s")
    print(*problems, f"{len(problems)} problems", sep="\n")
    if problems:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
