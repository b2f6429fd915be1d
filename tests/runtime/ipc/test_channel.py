"""Channels between processes."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import numpy as np
import pytest

from splitc.runtime.ipc.channel import USUAL, Channel
from splitc.runtime.ipc.shared_memory import create_memory, map_memory


@pytest.fixture
def channels() -> tuple[Channel, Channel]:
    one, other = socket.socketpair()
    return Channel(one.detach()), Channel(other.detach())


def test_descriptors_come_with_their_messages(channels: tuple[Channel, Channel]) -> None:
    one, other = channels
    memory = create_memory(4096)
    map_memory(os.dup(memory))[:3] = 1, 2, 3
    one.send("memory", memory)
    os.close(memory)
    assert other.receive() == "memory"
    assert map_memory(other.receive_descriptor())[:4].tolist() == [1, 2, 3, 0]
    one.close()
    with pytest.raises(EOFError):
        other.receive()
    other.close()


def test_what_does_not_fit_comes_later_and_whole(channels: tuple[Channel, Channel]) -> None:
    one, other = channels
    memory = create_memory(4096)
    posted = [bytes([number]) * 100_000 for number in range(10)]
    for each in posted:
        one.send_nowait(each, memory)
    os.close(memory)
    got: list[bytes] = []
    while len(got) < len(posted):
        one.flush()
        got += other.take()
    assert got == posted
    assert all(map_memory(other.receive_descriptor()).nbytes == 4096 for _ in posted)
    one.close()
    other.close()


def test_long_and_short_arrays_arrive_as_they_were_sent(channels: tuple[Channel, Channel]) -> None:
    """In all orders, with sizes around the limit for shared memory; the receiver owns each array."""
    one, other = channels
    draw = np.random.default_rng(0)
    sizes = [0, 3, USUAL // 8 - 40, USUAL // 8 - 1, USUAL // 8, USUAL // 8 + 1, USUAL, 5 * USUAL]
    sent = [[draw.standard_normal(size) for size in draw.choice(sizes, draw.integers(0, 4))] for _ in range(40)]
    sent += [
        [np.arange(6 * USUAL).reshape(6, -1).T, np.arange(4 * USUAL)[::2]],
        [np.zeros((USUAL, 2), np.float16) for _ in range(70)],
    ]
    for message in sent:
        one.send_nowait((len(message), message))
    got: list[tuple[int, list[np.ndarray]]] = []
    while len(got) < len(sent):
        one.flush()
        got += other.take()
    for (count, arrays), message in zip(got, sent, strict=True):
        assert count == len(message) == len(arrays)
        for array, expected in zip(arrays, message, strict=True):
            np.testing.assert_array_equal(array, expected)
            array += 1
            assert array.dtype == expected.dtype and array.flags.aligned
    one.close()
    other.close()


def test_descriptors_that_nobody_takes_are_closed(channels: tuple[Channel, Channel]) -> None:
    one, other = channels
    before = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else pytest.skip("no /proc")
    memory = create_memory(4096)
    for _ in range(3):
        one.send("memory", memory)
        other.receive()
    os.close(memory)
    one.close()
    other.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before - 2
