"""Arrays that pass from one process to another in shared memory."""

from __future__ import annotations

import gc
import os
import sys
import threading
from queue import SimpleQueue

import numpy as np
import psutil
import pytest

from splitc.runtime.arrays.array import Array
from splitc.runtime.ipc import shared_memory
from splitc.runtime.ipc.demand import RECENT, WASTE
from splitc.runtime.ipc.shared_memory import Borrower, Lender, create_memory, map_memory
from tests.helpers.freed import code_as_freed
from tests.helpers.maps import mapped

LARGE, SMALL = 1 << 18, 3
WANTED = {"a": ((4,), np.dtype(np.float32))}


class Pair:
    """A lender and its borrower, with descriptors handed over as they are."""

    def __init__(self) -> None:
        self.lender = Lender()
        self._sent: list[int] = []
        self.borrower = Borrower(lambda: self._sent.pop(0))

    def pass_on(self, given: dict[str, Array]) -> tuple[int, dict[str, Array]]:
        """The number of the buffer, and the arrays at the other end."""
        sent, new = self.lender.send(list(given.items()))
        self._sent += new
        assert sent is not None
        return sent.buffer, self.borrower.receive(sent)

    def give_back(self) -> None:
        self.lender.give_back(self.borrower.unused())


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_buffer_comes_back_when_nobody_has_its_arrays(size: int) -> None:
    pair, buffers = Pair(), set()
    for number in range(4):
        given: dict[str, Array] = {"a": np.full((size,), number, np.float32), "b": np.full((2, 1), -number, np.int64)}
        buffer, got = pair.pass_on(given)
        np.testing.assert_equal(got, given)
        buffers.add(buffer)
        del got
        gc.collect()
        pair.give_back()
    assert buffers == {0}


def test_arrays_are_freed_without_python_code() -> None:
    pair = Pair()
    _, got = pair.pass_on({"a": np.zeros(LARGE)})
    assert code_as_freed([got.popitem()[1]]) == []
    assert pair.borrower.unused() == [0]


def test_a_buffer_is_not_given_back_while_its_arrays_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may send a request meanwhile, with the unused buffers: the rank would write to them."""
    pair, view = Pair(), shared_memory.view

    class Watched(np.ndarray):
        def copy(self, *_: object) -> Array:  # type: ignore[override]
            assert pair.borrower.unused() == []
            return np.array(self)

    monkeypatch.setattr(shared_memory, "view", lambda *at: view(*at).view(Watched))
    pair.pass_on({"a": np.zeros(SMALL), "b": np.zeros(SMALL)})
    assert pair.borrower.unused() == [0]


def test_allocated_arrays_are_sent_without_a_copy() -> None:
    pair = Pair()
    arrays = pair.lender.allocate({"a": ((LARGE,), np.dtype(np.float32))})
    arrays["a"][...] = 7
    _, got = pair.pass_on(arrays)
    arrays["a"][0] = 8
    assert got["a"][0] == 8


def test_buffer_of_a_request_that_failed_is_used_again() -> None:
    pair = Pair()
    failed = pair.lender.allocate(WANTED)
    kept = pair.lender.allocate(WANTED)
    del failed
    assert pair.pass_on(pair.lender.allocate(WANTED))[0] == 0
    assert pair.pass_on(kept)[0] == 1


def test_arrays_that_can_not_be_written_take_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    monkeypatch.setattr(shared_memory, "view", lambda *_: np.empty(0))
    with pytest.raises(ValueError, match="broadcast"):
        pair.lender.send([("a", np.zeros(3))])
    monkeypatch.undo()
    assert pair.pass_on({"a": np.zeros(3)})[0] == 0


def test_what_is_fed_is_looked_at_where_it_is() -> None:
    """Feeds are not copied. Their buffer is used again only after the request has ended."""
    lender, sent_descriptors = Lender(), list[int]()
    borrower = Borrower(lambda: sent_descriptors.pop(0))
    views = []
    for number in range(2):
        sent, new = lender.send([("a", np.full((3, 2), number, np.float16)), ("a", np.array(number))])
        sent_descriptors += new
        views.append(borrower.look(sent))
    for number, each in enumerate(views):
        np.testing.assert_equal(each, [("a", np.full((3, 2), number, np.float16)), ("a", np.array(number))])


def test_memory_that_is_many_times_too_large_is_given_back() -> None:
    """At both ends, when no one holds its arrays, but not if such requests come now and then."""
    pair, before = Pair(), mapped()
    small: dict[str, Array] = {"a": np.ones(4, np.float32)}
    large: dict[str, Array] = {"a": np.ones(WASTE << 16, np.float32)}

    def work(large_ones: int) -> None:
        for number in range(3 * RECENT):
            pair.pass_on(large if number % RECENT < large_ones else small)
            pair.give_back()

    work(1)
    held = pair.pass_on(large)[1]["a"]
    assert mapped() - before == 2 * held.nbytes
    work(0)
    assert mapped() - before >= 2 * held.nbytes and held.min() == held.max() == 1  # of an answer that somebody keeps
    del held
    work(0)
    assert mapped() - before == 2 << 16
    pair.lender.close()


def test_maps_need_no_descriptors() -> None:
    before = psutil.Process().num_fds()
    memory = [map_memory(create_memory(4096)) for _ in range(10)]
    assert psutil.Process().num_fds() == before
    part, bytes_ = memory[3][10:20], mapped()
    del memory
    assert mapped() == bytes_ - 9 * 4096
    part[...] = 1  # its memory is there as long as it is
    with pytest.raises(OSError, match="Bad file"):
        map_memory(9999)


def test_arrays_may_be_allocated_while_another_thread_sends() -> None:
    """No buffer goes to two requests: one would have the other's outputs."""
    lender, allocated, ended, twice = Lender(), SimpleQueue[dict[str, Array] | None](), SimpleQueue[int](), list[int]()

    def send() -> None:
        held: dict[int, dict[str, Array]] = {}
        while (arrays := allocated.get()) is not None:
            sent, new = lender.send(list(arrays.items()))
            for descriptor in new:
                os.close(descriptor)
            assert sent is not None
            twice.extend({sent.buffer} & held.keys())
            held[sent.buffer] = arrays
            if len(held) > 6:
                held.pop(oldest := next(iter(held)))
                ended.put(oldest)

    sender, interval = threading.Thread(target=send), sys.getswitchinterval()
    sender.start()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(30_000):
            while not ended.empty():
                lender.give_back([ended.get()])
            arrays = lender.allocate(WANTED)
            if number % 3 and allocated.qsize() < 8:  # the others are of requests that failed
                allocated.put(arrays)
            del arrays
    finally:
        sys.setswitchinterval(interval)
        allocated.put(None)
        sender.join()
    assert twice == []
