"""A signal at one call or return of the main thread, by its number, in splitc's code and in some modules that it uses.

    python tests/helpers/signal_at.py 0 SIGINT sites.json run PACKAGE ...       # lists the calls and returns
    python tests/helpers/signal_at.py 1234 SIGINT sites.json run PACKAGE ...    # sends the signal at this one

`run PACKAGE ...` is a command of splitc. Calls are counted from its start.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

ROOT, TESTS = (str(Path(__file__).resolve().parents[up]) for up in (2, 1))
# Modules in whose code signals come, beside splitc's: those with locks, threads and processes.
OTHERS = ("threading", "concurrent", "contextlib", "queue", "signal", "socket", "subprocess", "tempfile", "weakref")


@cache
def _is_counted(file: str) -> bool:
    return not file.startswith(TESTS) and (file.startswith(ROOT) or any(f"/{other}" in file for other in OTHERS))


@dataclass
class SignalAt:
    """Sends the signal at this call or return; `where` says where that was. Without a number it sends none.

    They are counted from the first call of the function `begin`, if it is given. `sites` has the first number of each
    place in the code.
    """

    at: int
    number: int = signal.SIGINT
    begin: str = ""
    where: str = ""
    count: int = 0
    sites: dict[str, int] = field(default_factory=dict)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """See sys.setprofile."""
        code = frame.f_code
        if self.begin:
            if code.co_name == self.begin and event == "call":
                self.begin = ""
            return
        file = code.co_filename
        if not _is_counted(file):
            return
        self.count += 1
        if self.at and self.count != self.at:
            return
        name = getattr(arg, "__name__", "") if event.startswith("c_") else ""
        caller = "" if frame.f_back is None else frame.f_back.f_code.co_name
        where = f"{file}:{frame.f_lineno} {caller} {code.co_name} {event} {name}"
        self.sites.setdefault(where, self.count)
        if self.at:
            sys.setprofile(None)
            self.where = where
            signal.raise_signal(self.number)

    def in_work(self, work: Callable[[], None]) -> None:
        """Do the work, which KeyboardInterrupt may end."""
        try:
            sys.setprofile(self)
            work()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)


def main() -> None:
    from splitc.runtime.__main__ import main as splitc

    at, number, sites, *sys.argv[1:] = sys.argv[1:]
    sys.argv[0] = "splitc"
    coming = SignalAt(int(at), signal.Signals[number], "run_app")
    sys.setprofile(coming)
    try:
        splitc()
    finally:
        if not coming.at:
            sys.setprofile(None)
            Path(sites).write_text(json.dumps(coming.sites))


if __name__ == "__main__":
    main()
