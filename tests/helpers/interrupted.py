"""A program that uses a package and is interrupted at random moments, which it catches to go on.

    python -m tests.helpers.interrupted PACKAGE EXPECTED threads --interrupts 100 --seed 7

EXPECTED is a file of the package's outputs for the requests of `sized`, and its tokens. Prints a line for each
interrupt, and at the end what was wrong. With --endless it runs until it is ended.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from splitc.runtime import Session
from splitc.runtime.errors import SplitcError
from tests.helpers.sweep import REQUESTS, sized

PROMPT, TOKENS = [5, 17, 33], 6
# Seconds until an interrupt: mostly during a few requests, and sometimes while a session opens.
SOON, LATER = (5e-5, 4e-3), (0.0, 0.4)
# The share of interrupts that come while a session is opened and closed.
OPENING = 0.1
# Seconds after which an interrupt counts as lost: Python drops what is raised while it frees an object.
LOST = 2.0


class Caller:
    """Opens sessions, uses them, and compares all outputs."""

    def __init__(self, package: Path, expected: dict[str, Any], ranks: str | None, seed: int) -> None:
        self.package, self.expected, self.ranks = package, expected, ranks
        self.random = random.Random(seed)
        self.found: Counter[str] = Counter()

    def open(self) -> Session:
        return Session(self.package, threads=1, ranks=self.ranks, in_flight=3)

    def check(self, outputs: dict[str, Any], number: int) -> None:
        if not np.allclose(outputs["logits"], self.expected[str(number)], rtol=1e-4, atol=1e-5):
            self.found["WRONG outputs"] += 1

    def use(self, session: Session) -> None:
        """Run some requests of a random kind."""
        kind, numbers = self.random.randrange(5), [self.random.randrange(REQUESTS) for _ in range(3)]
        if kind < 2:
            self.check(session.run(sized(numbers[0])), numbers[0])
        elif kind == 2:
            futures = [session.submit(sized(number)) for number in numbers]
            for future, number in zip(futures, numbers, strict=True):
                self.check(future.result(), number)
        elif kind == 3:
            for outputs, number in zip(session.map(map(sized, numbers)), numbers, strict=True):
                self.check(outputs, number)
        elif list(session.generate(PROMPT, max_new_tokens=TOKENS)) != self.expected["tokens"].tolist():
            self.found["WRONG tokens"] += 1

    def open_and_use(self) -> None:
        with self.open() as session:
            self.use(session)

    def interrupted(self, work: Callable[[], None], seconds: tuple[float, float]) -> None:
        """Repeat the work until an interrupt comes."""
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, self.random.uniform(*seconds))
                end = time.monotonic() + LOST
                while time.monotonic() < end:
                    work()
                self.found["interrupts that Python dropped"] += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            self.found["interrupts"] += 1

    def run(self, interrupts: int) -> Session:
        """Be interrupted this many times. Returns the session that is open then."""
        session = self.open()
        for number in range(interrupts):
            try:
                if self.random.random() < OPENING:
                    if self.ranks is None:  # MPI's ranks serve one session at a time
                        session.close()
                    self.interrupted(self.open_and_use, LATER)
                    session = self.open() if self.ranks is None else session
                else:
                    self.interrupted(partial(self.use, session), SOON)
            except SplitcError as error:
                self.found[f"ERROR {error}"] += 1
                session.close()
                session = self.open()
            print(number, flush=True)
        self.wait_for_places(session)
        return session

    def wait_for_places(self, session: Session) -> None:
        """Wait for the end of all interrupted requests."""
        end, places = time.monotonic() + 10, session._admission._places
        while places._value != session.in_flight:
            if time.monotonic() > end:
                self.found[f"LOST {session.in_flight - places._value} places of requests"] += 1
                return
            time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("expected", type=Path)
    parser.add_argument("ranks", choices=["threads", "processes", "mpi"])
    parser.add_argument("--interrupts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--endless", action="store_true")
    options = parser.parse_args()
    faulthandler.enable()
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    sys.unraisablehook = lambda _: None  # interrupts that Python drops
    with np.load(options.expected) as expected:
        ranks = None if options.ranks == "mpi" else options.ranks
        caller = Caller(options.package, dict(expected), ranks, options.seed)
    session = caller.run(options.interrupts)
    print(json.dumps(caller.found), flush=True)
    while options.endless:
        caller.use(session)
    session.close()


if __name__ == "__main__":
    main()
