"""Ctrl-C and SIGTERM: at a time when they can do no harm, and not at one when they get lost."""

from __future__ import annotations

# What the module signal is made of: its own functions look for enums, which takes six times as long.
import _signal  # type: ignore[import-not-found]
import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


@contextmanager
def later_interrupts() -> Iterator[Callable[[], bool]]:
    """Let signals that raise (SIGINT, and SIGTERM where it has a handler) come at the end of the block.

    The function that it gives says whether one waits. Python runs its handlers on the main thread, so on others nothing
    is to be done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield _never
        return
    gate = _Gate()
    try:
        for each in (signal.SIGINT, signal.SIGTERM):
            handler = _signal.getsignal(each)
            while isinstance(handler, _Gate) and handler.is_open:  # one that a signal has left, as it was taken away
                handler = handler.handlers[each]
            if callable(handler):
                gate.handlers[each] = handler
                _signal.signal(each, gate)
        yield gate.is_waited_for
    finally:
        gate.is_open = True  # at once for all: the handler of one may raise before that of another one is back
        try:
            for number, own in gate.handlers.items():
                if _signal.getsignal(number) is gate:  # or else the block has set something else
                    _signal.signal(number, own)
        finally:
            gate.let_in()


def _never() -> bool:
    return False


class _Gate:
    """A handler of signals that keeps them for their own `handlers`, until it is open."""

    def __init__(self) -> None:
        self.handlers: dict[int, Handler] = {}
        self.is_open = False
        self._waiting: list[tuple[int, FrameType | None]] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_open:
            self.handlers[number](number, frame)
        else:
            self._waiting.append((number, frame))

    def is_waited_for(self) -> bool:
        """Whether a signal has come."""
        return bool(self._waiting)

    def let_in(self) -> None:
        """Call what handles those that came by now. The first one may raise, so another one comes again."""
        if self._waiting:
            (number, frame), *others = self._waiting
            for other in {other for other, _ in others} - {number}:
                _come_again(other)
            if callable(handler := _signal.getsignal(number)):
                handler(number, frame)


# Seconds after which a signal comes again that could not be handled.
AGAIN = 0.01


def handle_signals() -> None:
    """Let SIGINT raise KeyboardInterrupt and SIGTERM SystemExit, so that both are cleaned up after alike.

    A signal that comes while a module is imported comes again until the import has ended, since the C++ of some modules
    crashes if something is raised in it. So does one that comes while an object is freed: Python drops what is raised
    there. From now on, for the whole process. SIGINT is still ignored where it was, as in a shell's background.
    """
    signal.signal(signal.SIGTERM, _after_imports(lambda *_: sys.exit(128 + signal.SIGTERM)))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _after_imports(signal.default_int_handler))
    if not isinstance(sys.unraisablehook, _Dropped):
        sys.unraisablehook = _Dropped(sys.unraisablehook)
        sys.excepthook = partial(_show_uncaught, sys.excepthook)


def _show_uncaught(others: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):  # outside of all commands, as Python begins or ends
        print("error: interrupted", file=sys.stderr)
    else:
        others(kind, error, trace)


def _after_imports(handler: Handler) -> Handler:
    def handle(number: int, frame: FrameType | None) -> None:
        if _imports(frame):
            _come_again(number)
        else:
            handler(number, frame)

    return handle


def _imports(frame: FrameType | None) -> bool:
    """Whether a frame is part of an import: Python's own code for it is on the stack."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _come_again(number: int) -> None:
    # Not by Python's Thread, which takes a lock that the code may have in whose midst the signal came.
    _thread.start_new_thread(_kill_later, (number,))


def _kill_later(number: int) -> None:
    time.sleep(AGAIN)
    os.kill(os.getpid(), number)


@dataclass(frozen=True)
class _Dropped:
    """Gets what Python drops. Other than signals goes to the hook before it."""

    others: Callable[[sys.UnraisableHookArgs], Any]

    def __call__(self, what: sys.UnraisableHookArgs) -> None:
        number = {SystemExit: signal.SIGTERM, KeyboardInterrupt: signal.SIGINT}.get(what.exc_type)
        if number is None:
            self.others(what)
        else:
            _come_again(number)
