"""Generated text of packages in each split mode: each step compared with the unsplit model, and how fast it was.

    python -m tests.benchmarks.generation MODEL.onnx FOLDER --modes "one device" tensor --tokens 40

Takes those models that have states. All steps of a prompt read whole, of one read in chunks, and of several rows with
padding, are compared with the unsplit model in ONNX Runtime, fed the same: a cell is the largest difference of an
output, relative to its largest value. Then package and unsplit model take turns with the same number of threads in all:
how many times as fast the package is until the first token, and until the last. Exits with 1 if a step differs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from splitc.compiler import compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.cli.terminal import out, table
from splitc.runtime.engines.onnxruntime_cpu import ERRORS
from splitc.runtime.errors import MisuseError, SplitcError
from splitc.runtime.generate.capacity import count_tokens
from splitc.runtime.generate.conversation import ModelRunner
from splitc.runtime.generate.signature import find_signature
from splitc.runtime.generate.tokens import Timings, generate
from tests.helpers.packages import MODES
from tests.helpers.steps import Differences, Recorder, Unsplit, compare_steps, run_rows

PROMPT = [5, 9, 2, 7, 3, 8, 1]
DRIVES: dict[str, Callable[[Recorder], object]] = {
    "whole": lambda session: drain(session, PROMPT, 5),
    "chunks": lambda session: drain(session, PROMPT, 5, chunk=2),
    "rows": lambda session: run_rows(session, 2, (5, 3, 1, 1), padded=2),
}


def drain(session: ModelRunner, prompt: Sequence[int], count: int, chunk: int = 512) -> Timings:
    """Generate tokens; the times of it."""
    timings = Timings()
    for _ in generate(session, prompt, max_new_tokens=count, prompt_chunk=chunk, timings=timings):
        pass
    return timings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3, help="of timing; with 0 there is none")
    options = parser.parse_args()
    rows = table("model", "mode", *DRIVES, "first", f"all {options.tokens}", right=("first", f"all {options.tokens}"))
    differ = False
    for model in find_models(options.models):
        for mode in options.modes:
            with tempfile.TemporaryDirectory() as folder:
                cells, said = measure(model, mode, Path(folder), options)
            if cells is None:
                continue
            differ |= bool(said)
            rows.add_row(model.parent.name if model.stem == "model" else model.stem, mode, *cells)
            for text in said:
                out.print(f"{model} {mode}: {text}", soft_wrap=True)
    out.print(rows)
    sys.exit(differ)


def find_models(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        yield from sorted(path.rglob("*.onnx")) if path.is_dir() else [path]


def measure(model: Path, mode: str, folder: Path, options: argparse.Namespace) -> tuple[list[str] | None, list[str]]:
    """The cells of a row, and what differs; no cells for a model without states."""
    devices, request = MODES[mode]
    try:
        plan = plan_model(model, [devices], replace(request, spread=True))
        if not plan.analysis.states:
            return None, []
        compile_model(plan, folder / "package", verify=False)
        with Session(folder / "package", threads=1, verify="never") as session:
            unsplit = Unsplit(model, session.manifest, len(session.devices))
            driven = {name: drive(run, session, unsplit) for name, run in DRIVES.items()}
            cells = [cell for cell, _ in driven.values()]
            if options.rounds and cells[0][0].isdigit():
                cells += ratios(session, unsplit, options)
            return cells, [f"{name}: {text}" for name, (_, said) in driven.items() for text in said]
    except SplitcError as error:
        return [type(error).__name__], [] if isinstance(error, MisuseError) else [str(error)]


def drive(run: Callable[[Recorder], object], session: Session, unsplit: Unsplit) -> tuple[str, list[str]]:
    """The largest difference of all steps, and what failed."""
    recorder = Recorder(session)
    try:
        run(recorder)
    except MisuseError as error:
        return "-", [] if "can't generate" in str(error) else [str(error)]
    except SplitcError as error:
        try:
            run(Recorder(unsplit))
        except ERRORS:
            return "-", []  # the unsplit model does not take that either
        return "failed", [str(error)]
    made: Differences = compare_steps(recorder.sequences, unsplit)
    wrong = [f"{d.name} differs by {d.relative:.1e}{d.problem or ''}" for d in made if not d.passed]
    return f"{max(d.relative for d in made):.0e}" + "!" * bool(wrong), wrong[:1]


def ratios(session: Session, unsplit: Unsplit, options: argparse.Namespace) -> list[str]:
    """How many times as fast as the unsplit model the package is: until the first token, and until the last."""
    prompt = [1 + number % 50 for number in range(options.prompt)]
    count = count_tokens(session.manifest, find_signature(session.manifest), options.prompt, None)
    count = min(options.tokens, count)
    runs: list[Callable[[], Timings]] = [partial(drain, one, prompt, count) for one in (unsplit, session)]
    times = [[run() for run in runs] for _ in range(options.rounds + 1)][1:]  # the first warms up
    first = [[one.prompt_seconds for one in pair] for pair in times]
    last = [[one.prompt_seconds + one.seconds for one in pair] for pair in times]
    return [f"{statistics.median(whole / own for whole, own in pairs):.2f}" for pairs in (first, last)]


if __name__ == "__main__":
    main()
