"""Interrupts and kills at random moments: there must be no wrong answer, no hang, no crash, and nothing left behind.

    python -m tests.benchmarks.interrupts --count 5000 --log interrupts.jsonl

A fifth of them are signals to the commands run, check, bench and generate, with ranks as threads, as processes, and
under MPI. The others interrupt a Python program that catches KeyboardInterrupt, goes on with its session, and at last
is ended by a signal. Results are in the log, so that another run continues where this one ended. Prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np

from models.llama import build
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.arrays.files import load_arrays, save_arrays
from splitc.runtime.cli.terminal import out, table
from tests.conftest import DECODER, decoder_feeds, run_whole
from tests.helpers.interrupted import PROMPT, TOKENS
from tests.helpers.killed import Killed, codes, end_marked, kill_after, left_in, marked, start_marked
from tests.helpers.mpi import MPICH, Mpi
from tests.helpers.sweep import REQUESTS, sized

# Interrupts of a program that goes on, and the share of trials that are commands.
BATCH, COMMANDS = 100, 5
# Seconds after which an ended process counts as hanging, or as left behind.
PATIENCE, LEAVING = 20.0, 15.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
RANKS = ("threads", "processes", "mpi")
WORDS = {
    "run": ["run", "PACKAGE", "--inputs", "INPUTS", "--outputs", "OUTPUTS"],
    "check": ["check", "PACKAGE", "--model", "MODEL", "--no-memory"],
    "bench": ["bench", "PACKAGE", "--runs", "20", "--no-memory"],
    "generate": ["generate", "PACKAGE", "--prompt-ids", ",".join(map(str, PROMPT)), "-n", str(TOKENS)],
}
PROBLEMS = ("wrong", "hang", "crash", "traceback", "left")
# Not preventable: MPICH creates a file that its processes open by name. It stays if the job is killed before all of
# them have opened it.
HELPLESS = "name"
# Messages of MPIs about a crashed process.
CRASHED = ("signal 11", "signal 6 ", "Segmentation", "Aborted", "core dumped")


@dataclass(frozen=True)
class Trial:
    """A command that is ended, or a program that is interrupted BATCH times and then ended."""

    number: int
    what: str
    ranks: str
    seed: int

    @property
    def mpi(self) -> Mpi | None:
        return MPICH if self.ranks == "mpi" else None


@dataclass
class Outcome:
    """A trial's number of interrupts, the seconds after the last one, and what was wrong."""

    number: int
    kind: str
    interrupts: int = 1
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Material:
    """A package, its model, and its outputs."""

    folder: Path
    logits: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]
    tokens: list[int]

    def words(self, trial: Trial, place: Path) -> list[object]:
        """A trial's command line."""
        places = {
            "PACKAGE": self.folder / "package",
            "MODEL": self.folder / "model.onnx",
            "INPUTS": self.folder / "inputs.npz",
            "OUTPUTS": place / "outputs.npz",
        }
        ranks = [] if trial.mpi else ["--ranks", trial.ranks]
        return [*(places.get(word, word) for word in WORDS[trial.what]), *ranks]


def make_material(folder: Path) -> Material:
    """A small decoder in three stages."""
    model, package = folder / "model.onnx", folder / "package"
    save(build(DECODER), model)
    compile_model(plan_model(model, ["3xcpu"], Request(split_mode="layer")), package)
    with Session(package, threads=1, ranks="threads") as session:
        tokens = list(session.generate(PROMPT, max_new_tokens=TOKENS))
    logits = {str(number): run_whole(model, sized(number))["logits"] for number in range(REQUESTS)}
    save_arrays(folder / "inputs.npz", decoder_feeds())
    save_arrays(folder / "expected.npz", {**logits, "tokens": np.array(tokens)})
    return Material(folder, {**logits, "inputs": run_whole(model, decoder_feeds())["logits"]}, tokens)


def plan(count: int, seed: int) -> list[Trial]:
    """Trials with this many interrupts together."""
    trials, planned = list[Trial](), 0
    while planned < count:
        number = len(trials)
        mine = np.random.default_rng([seed, number])
        program = number % (BATCH // (COMMANDS - 1) + 1) == 0
        what = "program" if program else str(mine.choice(list(WORDS)))
        trials.append(Trial(number, what, RANKS[number % 3] if program else str(mine.choice(RANKS)), seed))
        planned += BATCH if program else 1
    return trials


class Trials:
    """Runs trials. The seconds of undisturbed commands are measured once."""

    def __init__(self, material: Material) -> None:
        self._material = material
        self._known: dict[tuple[str, str], float] = {}
        self._measuring, self._one_mpi = threading.Lock(), threading.Lock()

    def run(self, trial: Trial) -> Outcome:
        """Run a trial, and add what was wrong."""
        random = np.random.default_rng([trial.seed, trial.number, 1])
        end = SIGNALS[random.integers(len(SIGNALS))]
        outcome = Outcome(trial.number, f"{trial.what} {trial.ranks} {end.name}")
        alone = self._one_mpi if trial.mpi else nullcontext()
        with alone, tempfile.TemporaryDirectory(prefix="splitc-interrupts-") as folder:
            before = _shared_memory()
            if trial.what == "program":
                self._interrupt(trial, end, Path(folder), outcome)
            else:
                self._end(trial, end, random.random(), Path(folder), outcome)
            if trial.mpi:
                outcome.problems += _left_in_memory(before, end)
        return outcome

    def _end(self, trial: Trial, end: signal.Signals, when: float, place: Path, outcome: Outcome) -> None:
        """Run a command that gets a signal."""
        words = self._material.words(trial, place)
        after = 1.1 * self._seconds(trial) * when
        try:
            found = kill_after(after, end, words, place, trial.mpi, patience=PATIENCE)
        except subprocess.TimeoutExpired:
            outcome.problems.append(f"hang: no end {PATIENCE:.0f} s after the signal, which came after {after:.3f} s")
            return
        except AssertionError:
            outcome.problems.append(f"left: processes, {LEAVING:.0f} s after the end; the signal came at {after:.3f} s")
            return
        outcome.seconds = max(0.0, found.seconds - after)
        outcome.problems += self._wrongs(trial, end, found, place)

    def _wrongs(self, trial: Trial, end: signal.Signals, found: Killed, place: Path) -> Iterator[str]:
        if trial.mpi is None and found.code not in codes(end):
            yield f"{'wrong' if found.code == 4 else 'crash'}: code {found.code}: {found.errors[-500:]}"
        if trial.mpi is not None and (found.code == 4 or any(each in found.errors for each in CRASHED)):
            yield f"crash: code {found.code}: {found.errors[-500:]}"
        if "Traceback" in found.errors or "Exception ignored" in found.errors:
            yield f"traceback: {found.errors[-1500:]}"
        yield from (f"left: {each}" for each in found.temporary)
        if (outputs := place / "outputs.npz").exists():
            given = load_arrays(outputs)["logits"]
            if not np.allclose(given, self._material.logits["inputs"], rtol=1e-4, atol=1e-5):
                yield "wrong: outputs"
        # mpiexec reports the interrupt on stdout too.
        shown = " ".join(line for line in found.shown.splitlines() if not line.startswith("[mpiexec@")).split()
        if trial.what == "generate" and found.code == 0 and shown != [str(t) for t in self._material.tokens]:
            yield f"wrong: tokens {found.shown}"

    def _seconds(self, trial: Trial) -> float:
        key = trial.what, trial.ranks
        with self._measuring, tempfile.TemporaryDirectory() as folder:
            if key not in self._known:
                words = self._material.words(trial, Path(folder))
                self._known[key] = kill_after(None, 0, words, Path(folder), trial.mpi).seconds
            return self._known[key]

    def _interrupt(self, trial: Trial, end: signal.Signals, place: Path, outcome: Outcome) -> None:
        """Run a program that goes on after each interrupt."""
        folder, seed = self._material.folder, str(1000 * trial.seed + trial.number)
        asked = [str(folder / "package"), str(folder / "expected.npz"), trial.ranks, "--interrupts", str(BATCH)]
        program = ["-m", "tests.helpers.interrupted", *asked, "--seed", seed, "--endless"]
        mark, process = start_marked(place, program, trial.mpi)
        lines, errors = _read(process)
        try:
            while not (line := lines.get(timeout=60 if outcome.interrupts == 1 else PATIENCE)).startswith("{"):
                if not line:
                    outcome.problems.append(f"crash: code {process.wait()}: {''.join(errors)[-1500:]}")
                    return
                outcome.interrupts += 1
        except Empty:
            outcome.problems.append(f"hang: after {outcome.interrupts} interrupts\n{_stacks(mark, errors)}")
            return
        finally:
            if outcome.problems:
                end_marked(mark)
        found = json.loads(line)
        outcome.problems += [f"wrong: {count} x {what}" for what, count in found.items() if what[:5].isupper()]
        time.sleep(float(np.random.default_rng(trial.number).random()))
        process.send_signal(end)
        began = time.monotonic()
        _expect_end(process, mark, errors, outcome)
        outcome.seconds = time.monotonic() - began
        if end != signal.SIGKILL:
            outcome.problems += [f"left: {each}" for each in left_in(place)]


def _expect_end(process: subprocess.Popen[str], mark: str, errors: Sequence[str], outcome: Outcome) -> None:
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        outcome.problems.append(f"hang: no end {PATIENCE:.0f} s after the signal\n{_stacks(mark, errors)}")
    deadline = time.monotonic() + LEAVING
    while marked(mark):
        if time.monotonic() > deadline:
            outcome.problems.append(f"left: {len(marked(mark))} processes")
            end_marked(mark)
        time.sleep(0.05)


def _read(process: subprocess.Popen[str]) -> tuple[SimpleQueue[str], list[str]]:
    """The lines that a program prints, as they come, with an empty one at the end; and its error lines."""
    lines, errors = SimpleQueue[str](), list[str]()
    assert process.stdout is not None and process.stderr is not None
    shown, said = process.stdout, process.stderr

    def read() -> None:
        for line in shown:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    threading.Thread(target=lambda: errors.extend(said), daemon=True).start()
    return lines, errors


def _stacks(mark: str, errors: Sequence[str]) -> str:
    """The stacks of the program's processes."""
    for each in marked(mark):
        os.kill(each.pid, signal.SIGABRT)
    time.sleep(2)
    return "".join(errors)[-6000:]


def _shared_memory() -> set[Path]:
    """MPICH's files in shared memory."""
    return set(Path("/dev/shm").glob("mpich*"))


def _left_in_memory(before: Set[Path], end: signal.Signals) -> Iterator[str]:
    """A job's remaining files in shared memory. They are removed."""
    deadline = time.monotonic() + LEAVING
    while _shared_memory() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    for path in _shared_memory() - before:
        path.unlink(missing_ok=True)
        yield f"{HELPLESS if end == signal.SIGKILL else 'left'}: {path}"


def report(outcomes: Sequence[Outcome]) -> bool:
    """Print the results of all trials. Returns whether nothing was wrong."""
    rows = table("what", "interrupts", *PROBLEMS, "seconds", right=("interrupts", *PROBLEMS, "seconds"))
    for kind in sorted({each.kind for each in outcomes}):
        mine = [each for each in outcomes if each.kind == kind]
        wrong = Counter(problem.split()[0].rstrip(":") for each in mine for problem in each.problems)
        longest = max(each.seconds for each in mine)
        counts = [str(wrong[problem]) for problem in PROBLEMS]
        rows.add_row(kind, str(sum(each.interrupts for each in mine)), *counts, f"{longest:.1f}")
    out.print(rows)
    for each in outcomes:
        for problem in each.problems:
            print(f"{each.number} {each.kind}: {problem}")
    return not any(not problem.startswith(HELPLESS) for each in outcomes for problem in each.problems)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=[*WORDS, "program"], help="these alone")
    parser.add_argument("--log", type=Path, default=Path("interrupts.jsonl"))
    options = parser.parse_args()
    known = options.log.read_text().splitlines() if options.log.exists() else []
    outcomes = [Outcome(**json.loads(line)) for line in known]
    done = {each.number for each in outcomes}
    with tempfile.TemporaryDirectory() as folder, options.log.open("a") as log:
        trials = Trials(make_material(Path(folder)))
        with ThreadPoolExecutor(options.jobs) as pool:
            asked = [
                each for each in plan(options.count, options.seed) if not options.only or each.what in options.only
            ]
            left = [trial for trial in asked if trial.number not in done]
            for outcome in pool.map(trials.run, left):
                outcomes.append(outcome)
                log.write(json.dumps(asdict(outcome)) + "\n")
                log.flush()
    raise SystemExit(not report(outcomes))


if __name__ == "__main__":
    main()
