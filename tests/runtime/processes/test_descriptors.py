"""Sessions of processes with too many open files: they fail with a message, and nothing hangs."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from splitc.runtime import Session
from splitc.runtime.errors import SplitcError
from splitc.runtime.hardware.devices import Device
from splitc.runtime.ipc import shared_memory
from splitc.runtime.ipc.channel import Channel
from splitc.runtime.ipc.shared_memory import create_memory, map_memory
from splitc.runtime.processes import device_processes
from splitc.runtime.processes.device_processes import DeviceProcess
from splitc.runtime.processes.messages import Order, pack, unpack
from splitc.runtime.processes.ranks import RankProcesses
from splitc.runtime.processes.wire import SocketWire
from tests.conftest import assert_close, decoder_feeds, run_whole, until
from tests.helpers.packages import compile_mode
from tests.helpers.stopping import stop

# Nor may there be children beside the ranks.
pytestmark = pytest.mark.usefixtures("plain_ranks")


@contextmanager
def no_descriptors() -> Iterator[None]:
    """While the block runs, this process can open nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (1 + max(int(each.name) for each in Path("/proc/self/fd").iterdir()), hard)
        )
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_message_is_read_whose_descriptor_this_process_can_not_have() -> None:
    one, other = (Channel(each.detach()) for each in socket.socketpair())
    memory = create_memory(4096)
    one.send("with memory", memory)
    one.send("without")
    with no_descriptors():
        assert other.receive() == "with memory"
        assert other.receive() == "without"
        with pytest.raises(OSError, match=r"too many open files \(ulimit -n\)"):
            other.receive_descriptor()
    one.send("again", memory)
    assert other.receive() == "again"
    assert map_memory(other.receive_descriptor()).nbytes == 4096
    os.close(memory)
    one.close()
    other.close()


def test_answer_whose_memory_the_caller_can_not_open_breaks_the_session(decoder: Path) -> None:
    """The thread that reads answers must survive it, so that futures end."""
    with Session(compile_mode(decoder, "one device"), threads=1, ranks="processes", in_flight=2) as session:
        for _ in range(2):
            session.run(decoder_feeds())  # each slot is as large as these feeds
        workers: Any = session._workers
        for each in workers._wire._outputs:
            each._unused.clear()  # so that the ranks need new memory
        (rank,) = psutil.Process().children()
        stop(rank.pid)  # so that both are asked before the first is answered
        with no_descriptors():
            futures = [session.submit(decoder_feeds()) for _ in range(2)]
            os.kill(rank.pid, signal.SIGCONT)
            errors = [str(each.exception(20)) for each in futures]
        assert all("the session is broken: " in each and "too many open files (ulimit -n)" in each for each in errors)
        assert not session.usable
        with pytest.raises(SplitcError, match="too many open files"):
            session.run(decoder_feeds())


def test_request_without_memory_leaves_those_in_flight_alone(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next request must not get the slot of one in flight, and overwrite its feeds."""

    def full(size: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with Session(compile_mode(decoder, "one device"), threads=1, ranks="processes", in_flight=2) as session:
        session.run(decoder_feeds())
        session.run(decoder_feeds())
        ranks = psutil.Process().children()
        for each in ranks:
            stop(each.pid)
        asked = [decoder_feeds(past=past) for past in (4, 3)]
        first = session.submit(asked[0])
        monkeypatch.setattr(shared_memory, "create_memory", full)
        with pytest.raises(OSError, match="Too many open files"):
            session.submit(decoder_feeds(batch=64))
        monkeypatch.undo()
        second = session.submit(asked[1])
        for each in ranks:
            each.send_signal(signal.SIGCONT)
        for future, feeds in zip((first, second), asked, strict=True):
            assert_close(future.result(20), run_whole(decoder, feeds), 2e-5)


def test_rank_that_dies_before_the_session_is_there_ends_its_requests(
    decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session must be told, or its first request would wait forever."""
    wait = RankProcesses.wait_loaded

    def wait_and_lose(self: RankProcesses) -> None:
        wait(self)
        self._processes[0]._process.kill()
        until(lambda: self._stopped)

    monkeypatch.setattr(RankProcesses, "wait_loaded", wait_and_lose)
    with Session(compile_mode(decoder, "one device"), threads=1, ranks="processes") as session:
        until(lambda: not session.usable)
        with pytest.raises(SplitcError, match=r"the session is broken: .*rank 0 \(cpu0\) was ended by SIGKILL"):
            session.run(decoder_feeds())


def test_buffers_of_ranks_go_back_with_the_next_request_if_one_can_not_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise their ranks would never get them back, and allocate others."""

    def full(size: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    ours, theirs = (Channel(each.detach(), pack, unpack) for each in socket.socketpair())
    wire, feeds = SocketWire([ours], 1), [("x", np.ones(3, np.float32))]
    wire._outputs[0]._unused.append(7)
    order = Order(0, None, 0, {}, None, False, None, 0, None, ())
    with monkeypatch.context() as patch:
        patch.setattr(shared_memory, "create_memory", full)
        with pytest.raises(OSError, match="Too many open files"):
            wire.order(order, feeds, [])
    wire.order(order, feeds, [])
    received = theirs.receive()
    assert isinstance(received, Order) and received.unused == ((7,),)
    wire.close()
    theirs.close()


def test_process_that_can_not_be_made_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> Any:
        os.close(descriptor)
        raise OSError(errno.ENOMEM, "can't be mapped")

    before = list(Path("/proc/self/fd").iterdir())
    monkeypatch.setattr(device_processes, "map_memory", full)
    with pytest.raises(OSError, match="can't be mapped"):
        DeviceProcess(Device("cpu", 0), 0)
    assert list(Path("/proc/self/fd").iterdir()) == before
