"""Channels between processes."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from splitc.runtime.ipc.channel import Channel
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
