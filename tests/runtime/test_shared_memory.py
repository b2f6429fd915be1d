"""Arrays that go from one process to another in shared memory."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest

from splitc.runtime import shared_memory
from splitc.runtime.arrays import Array
from splitc.runtime.shared_memory import Borrower, Lender, SlotReader, SlotWriter, create_memory

LARGE, SMALL = 1 << 18, 3


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_buffer_comes_back_when_nobody_has_its_arrays(size: int) -> None:
    lender, borrower = Lender(), Borrower()
    buffers = set()
    for number in range(4):
        given: dict[str, Array] = {"a": np.full((size,), number, np.float32), "b": np.full((2, 1), -number, np.int64)}
        sent, descriptor = lender.send(given)
        assert sent is not None
        got = borrower.receive(sent, descriptor)
        np.testing.assert_equal(got, given)
        buffers.add(sent.buffer)
        del got
        gc.collect()
        lender.give_back(borrower.unused())
    assert buffers == {0}


def test_arrays_of_room_are_sent_without_a_copy() -> None:
    lender, borrower = Lender(), Borrower()
    room = lender.room({"a": ((LARGE,), np.dtype(np.float32))})
    room["a"][...] = 7
    sent, descriptor = lender.send(room)
    assert sent is not None
    got = borrower.receive(sent, descriptor)
    room["a"][0] = 8
    assert got["a"][0] == 8


def test_room_of_a_request_that_failed_is_used_again() -> None:
    lender = Lender()
    wanted = {"a": ((4,), np.dtype(np.float32))}
    failed = lender.room(wanted)
    kept = lender.room(wanted)
    del failed
    sent, _ = lender.send(lender.room(wanted))
    assert sent is not None and sent.buffer == 0
    also, _ = lender.send(kept)
    assert also is not None and also.buffer == 1


def test_feeds_that_can_not_be_written_change_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, descriptor = SlotWriter(1), create_memory(1 << 16)
    monkeypatch.setattr(shared_memory, "create_memory", lambda _: descriptor)
    monkeypatch.setattr(shared_memory, "view", lambda *_: np.empty(0))
    with pytest.raises(ValueError, match="broadcast"):
        writer.put(0, [("a", np.zeros(3))])
    monkeypatch.undo()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    _, later = writer.put(1, [("a", np.zeros(3))])
    assert later is not None, "the readers must be told of the memory"
    os.close(later)


def test_feeds_of_requests_in_flight_do_not_mix() -> None:
    writer, reader = SlotWriter(2), SlotReader(2)
    views: list[dict[str, Array]] = []
    for number in range(2):
        placed, descriptor = writer.put(number, [("a", np.full((3, 2), number, np.float16)), ("b", np.array(number))])
        assert descriptor is not None
        reader.renew(number, descriptor)
        views.append(reader.get(number, placed))
    for number, each in enumerate(views):
        np.testing.assert_equal(each, {"a": np.full((3, 2), number, np.float16), "b": np.array(number)})
