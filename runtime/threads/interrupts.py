"""Signals that raise, such as Ctrl-C, deferred while they could leave work half done, or get lost."""

from __future__ import annotations

# The C module beneath signal, whose own functions convert to enums, which takes six times as long.
import _signal  # type: ignore[import-not-found]
import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


def later_interrupts() -> AbstractContextManager[Callable[[], bool]]:
    """Defer signals whose handlers may raise (SIGINT's does) to the end of the block.

    The function that it yields says whether a signal has come since the block began. Python runs handlers on the main
    thread, so on other threads this does nothing. Nor does it inside another such block: signals come at the outer end.
    """
    if threading.current_thread() is not threading.main_thread():
        return _NEVER
    handlers = list(filter(callable, map(_signal.getsignal, SIGNALS)))  # a comprehension would take longer
    outer = handlers[0] if handlers else None
    if isinstance(outer, _Gate) and not outer.is_open and handlers.count(outer) == len(handlers):
        return nullcontext(partial(outer.has_more, len(outer.waiting)))
    return _Gate()


# Those that programs handle: SIGALRM for time limits, SIGUSR1 for a job that is to end soon.
NAMES = ("INT", "TERM", "ALRM", "HUP", "QUIT", "ABRT", "USR1", "USR2", "VTALRM", "PROF", "XCPU")
SIGNALS = tuple(getattr(signal, f"SIG{name}") for name in NAMES if hasattr(signal, f"SIG{name}"))
_NEVER: AbstractContextManager[Callable[[], bool]] = nullcontext(lambda: False)


class _Gate:
    """A handler that defers signals for their own handlers until the end of its block, when it is open."""

    def __init__(self) -> None:
        self.is_open = False
        self._handlers: dict[int, Handler] = {}
        self.waiting: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> Callable[[], bool]:
        try:
            for number in SIGNALS:
                handler = _signal.getsignal(number)
                while isinstance(handler, _Gate) and handler.is_open:  # left by a signal, as it was taken away
                    handler = handler._handlers[number]
                if callable(handler):
                    self._handlers[number] = handler
                    _signal.signal(number, self)
        except BaseException:  # of a signal that came before its own gate was shut
            self.__exit__()
            raise
        return partial(self.has_more, 0)

    def __exit__(self, *_: object) -> None:
        self.is_open = True  # at once for all: the handler of one may raise before that of another one is back
        try:
            for number, handler in self._handlers.items():
                if _signal.getsignal(number) is self:  # or else the block has set something else
                    _signal.signal(number, handler)
        finally:
            self._let_in()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_open:
            self._handlers[number](number, frame)
        else:
            self.waiting.append((number, frame))

    def has_more(self, count: int) -> bool:
        """Whether more signals than `count` have come."""
        return len(self.waiting) > count

    def _let_in(self) -> None:
        """Call the handlers of deferred signals. The first one may raise, so other signals are raised again."""
        if self.waiting:
            (number, frame), *others = self.waiting
            for other in {other for other, _ in others} - {number}:
                _come_again(other)
            if callable(handler := _signal.getsignal(number)):
                handler(number, frame)


# Seconds after which a signal is raised again that could not be handled. A choice: the block that put it off is a few
# calls long, and nobody notices a hundredth of a second.
AGAIN = 0.01


def handle_signals() -> None:
    """Let SIGINT raise KeyboardInterrupt and SIGTERM SystemExit, so that both are cleaned up after alike.

    A signal during an import is raised again until the import has ended: the C++ of some modules crashes on an
    exception. So is one that comes while an object is freed, where Python drops exceptions. This is for the whole
    process, for good. SIGINT is still ignored where it was, as in a shell's background.
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
    """Receives the exceptions that Python drops. Passes those that are not signals to the previous hook."""

    others: Callable[[sys.UnraisableHookArgs], Any]

    def __call__(self, what: sys.UnraisableHookArgs) -> None:
        number = {SystemExit: signal.SIGTERM, KeyboardInterrupt: signal.SIGINT}.get(what.exc_type)
        if number is None:
            self.others(what)
        else:
            _come_again(number)
