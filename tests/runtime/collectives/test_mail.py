"""Messages between ranks in different processes."""

from __future__ import annotations

import socket
from contextlib import closing

from splitc.runtime.collectives import LOADING
from splitc.runtime.collectives.mail import ProcessMail
from splitc.runtime.ipc.channel import Channel
from tests.conftest import until


def test_processes_come_after_all_others_are_gone() -> None:
    """If the caller is killed, one neighbour's process may be gone before the other is connected."""
    mail = ProcessMail()
    ours, theirs = socket.socketpair()
    theirs.close()
    gone = Channel(ours.detach())
    mail.connect(0, gone)
    until(lambda: gone.fileno() == -1)
    ours, theirs = socket.socketpair()
    mail.connect(2, Channel(ours.detach()))
    with closing(Channel(theirs.detach())) as other:
        other.send(((0, 1, 2), (LOADING, "value")))
        assert mail.queue((0, 1, 2)).get(timeout=10) == (LOADING, "value")
