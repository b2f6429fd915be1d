"""Signals at one call or return of the main thread after the other, while it uses a package and then goes on.

    python -m tests.helpers.sweep PACKAGE EXPECTED run threads --every 7

EXPECTED is a file of the outputs for each request of `sized`. Prints what was wrong, and ends with 1 if anything was.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from splitc.runtime import Session
from tests.helpers.feeds import Arrays, decoder_feeds
from tests.helpers.signal_at import SignalAt

REQUESTS = 4
# Seconds after which a use counts as hanging, and those in which what it leaves must be gone.
PATIENCE, LEAVING = 30.0, 5.0


def sized(number: int) -> Arrays:
    """Feeds of one of the REQUESTS."""
    return decoder_feeds(batch=1 + number % 3, new=1 + number % 4, past=number % 5)


@dataclass
class Sweep:
    """A package, and its outputs for some requests."""

    package: Path
    expected: list[Any]
    ranks: str
    wrong: list[str] = field(default_factory=list)

    def open(self) -> Session:
        return Session(self.package, threads=1, ranks=self.ranks, in_flight=3)

    def check(self, session: Session, number: int) -> None:
        """Raise ValueError if a request's outputs are wrong."""
        self.compare(session.run(sized(number)), number)

    def compare(self, outputs: Arrays, number: int) -> None:
        if not np.allclose(outputs["logits"], self.expected[number], rtol=1e-4, atol=1e-5):
            raise ValueError("the answer is WRONG")

    def run(self, session: Session) -> None:
        """One request."""
        self.check(session, 0)

    def submit(self, session: Session) -> None:
        """Several requests in flight."""
        for number, future in enumerate([session.submit(sized(number)) for number in (0, 1)]):
            self.compare(future.result(), number)

    def map(self, session: Session) -> None:
        """A stream of requests."""
        for number, outputs in enumerate(session.map(map(sized, range(3)))):
            self.compare(outputs, number)

    def generate(self, session: Session) -> None:
        """Tokens of a sequence."""
        list(session.generate([5, 17], max_new_tokens=2))

    def session(self, _: Session) -> None:
        """A new session."""
        with self.open() as session:
            self.check(session, 0)

    def try_all(self, use: Callable[[Session], None], every: int, first: int) -> int:
        """Send a signal at each call or return, or at some of them. Returns how many there are."""
        session, at = self.open(), first
        before = left_over()
        while True:
            coming = SignalAt(at)
            faulthandler.dump_traceback_later(PATIENCE, exit=True)
            try:
                coming.in_work(partial(use, session))
                if not coming.where:
                    return coming.count
                for number in (2, 3):
                    self.check(session, number)
                self.wait_for_ends(session, before)
            except Exception as error:
                self.wrong.append(f"{at}: {type(error).__name__}: {error}, after a signal at {coming.where}")
                session.close()
                session = self.open()
                before = left_over()
            at += every

    def wait_for_ends(self, session: Session, before: dict[str, int]) -> None:
        """Raise ValueError if something of an interrupted use is left."""
        places, end = session._admission._places, time.monotonic() + LEAVING
        while True:
            left = {name: count - before[name] for name, count in left_over().items() if count > before[name]}
            if not left and places._value == session.in_flight:
                return
            if time.monotonic() > end:
                raise ValueError(f"left: {left}, {session.in_flight - places._value} places")
            time.sleep(0.005)
            gc.collect()


def left_over() -> dict[str, int]:
    """The number of things that must end with a session."""
    process = psutil.Process()
    return {
        "processes": len(process.children()),
        "threads": sum(each.name.startswith("splitc") for each in threading.enumerate()),
        "descriptors": process.num_fds(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("expected", type=Path)
    parser.add_argument("use", choices=["run", "submit", "map", "generate", "session"])
    parser.add_argument("ranks", choices=["threads", "processes"])
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--first", type=int, default=1)
    options = parser.parse_args()
    with np.load(options.expected) as expected:
        sweep = Sweep(options.package, [expected[str(n)] for n in range(REQUESTS)], options.ranks)
    count = sweep.try_all(getattr(sweep, options.use), options.every, options.first)
    print(*sweep.wrong, f"{count} calls and returns, {len(sweep.wrong)} wrong", sep="\n")
    sys.exit(bool(sweep.wrong))


if __name__ == "__main__":
    main()
