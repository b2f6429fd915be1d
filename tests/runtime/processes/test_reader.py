"""The thread that receives messages of ranks' processes."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any, cast

import pytest

from splitc.runtime.ipc.channel import Channel
from splitc.runtime.processes.messages import Loaded
from splitc.runtime.processes.reader import Reader, _Watch
from splitc.runtime.processes.wire import SocketWire
from tests.conftest import until


def test_what_does_not_fit_into_a_socket_is_sent_as_soon_as_it_does() -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    rank = Channel(theirs.detach())
    wire = SocketWire([Channel(ours.detach())], 1)
    wire.send(Loaded(None, ("x" * 1_000_000,)))

    def answer() -> None:
        rank.receive()
        rank.send("it came")

    threading.Thread(target=answer).start()
    began = time.monotonic()
    while not (answers := wire.take(5.0)):
        assert time.monotonic() < began + 4, "it waited for an answer, though there was room"
    assert answers == [(0, "it came")]
    rank.close()
    wire.close()


def test_an_error_in_one_look_leaves_other_sessions_watched(caplog: pytest.LogCaptureFixture) -> None:
    class Fails:
        ended = False

        def glance(self) -> None:
            self.ended = True
            raise OSError("no look")

    class Counts:
        ended, count = False, 0

        def glance(self) -> None:
            self.count += 1
            self.ended = self.count == 2

    watch, counts = _Watch(), Counts()
    for each in (Fails(), counts):
        watch.add(cast("Reader", each))
    until(lambda: counts.ended)
    assert "no look" in caplog.text


def test_who_watches_is_started_again_where_there_were_too_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise ranks that died would go unnoticed in all sessions of the program."""

    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    class Glances:
        ended = False

        def glance(self) -> None:
            self.ended = True

    watch, first, second = _Watch(), Glances(), Glances()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        with pytest.raises(RuntimeError, match="can't start"):
            watch.add(cast("Reader", first))
    watch.add(cast("Reader", second))
    until(lambda: second.ended)
    watched: list[Any] = watch._readers
    assert first not in watched
