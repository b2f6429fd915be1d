"""Signals that are delayed for a while."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType, SimpleNamespace

import pytest

from splitc.runtime.threads.interrupts import later_interrupts
from tests.conftest import until

BOTH = (signal.SIGINT, signal.SIGTERM)
OTHERS = ("SIGALRM", "SIGHUP", "SIGUSR1", "SIGVTALRM")


@pytest.fixture
def came() -> Iterator[list[int]]:
    """The signals whose handlers have run. Each handler raises."""
    numbers: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        numbers.append(number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in BOTH}
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", BOTH)
def test_both_signals_come_after_the_block(came: list[int], first: int) -> None:
    handlers = [signal.getsignal(number) for number in BOTH]
    other = sum(BOTH) - first
    done = []
    with pytest.raises(KeyboardInterrupt), later_interrupts() as interrupted:
        assert not interrupted()
        signal.raise_signal(first)
        signal.raise_signal(other)
        signal.raise_signal(first)
        assert interrupted() and came == []
        done.append(1)
    assert done == [1] and came == [first]
    with pytest.raises(KeyboardInterrupt):
        until(lambda: False)
    assert came == [first, other]
    assert [signal.getsignal(number) for number in BOTH] == handlers


@pytest.mark.parametrize("name", OTHERS)
def test_signals_that_a_program_handles_come_after_the_block(name: str) -> None:
    """As one that limits a request's time."""
    number = getattr(signal, name, None)
    if number is None:
        pytest.skip("this system does not have it")
    done = []

    def handle(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(number, handle)
    try:
        with pytest.raises(TimeoutError), later_interrupts() as interrupted:
            with later_interrupts() as also:
                signal.raise_signal(number)
                assert interrupted() and also()
            done.append(1)
        assert done == [1] and signal.getsignal(number) is handle
    finally:
        signal.signal(number, before)


def test_handler_that_raises_as_it_comes_back_leaves_the_other_one(
    came: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    restore = signal.signal

    def interrupted(number: int, handler: object) -> object:
        before = restore(number, handler)  # type: ignore[arg-type]
        if handler is handlers[0]:
            signal.raise_signal(signal.SIGINT)
        return before

    handlers = [signal.getsignal(number) for number in BOTH]
    with pytest.raises(KeyboardInterrupt), later_interrupts():
        own = SimpleNamespace(signal=interrupted, getsignal=signal.getsignal)
        monkeypatch.setattr("splitc.runtime.threads.interrupts._signal", own)
    monkeypatch.undo()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert came == [signal.SIGINT, signal.SIGTERM]
