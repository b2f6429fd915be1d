"""Python values between rank processes: one channel for each pair of processes."""

from __future__ import annotations

import os
import selectors
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any, Protocol, cast

from splitc.runtime.collectives import LOADING, Label
from splitc.runtime.errors import HandOverError
from splitc.runtime.ipc.channel import Channel, portable
from splitc.runtime.threads.failures import Failure, first_failure

# Seconds within which a session ends the processes of all ranks if that of one has ended. A choice: half of the 10 s in
# which an error is promised. If it were over sooner, this rank would report the loss, which says less.
ENDING = 5.0


class Mail(Protocol):
    """A rank's end of the messages between ranks. Those of one rank arrive in order."""

    def tell(self, target: int, label: Label, value: Any) -> None:
        """Send a value to a rank. Does not wait until it is received. Raises RuntimeError if the rank is gone."""

    def hear(self, source: int) -> tuple[Label, Any] | Failure:
        """Wait for the next value from a rank. Returns it with its label; a Failure if all waits were ended."""


def tell_all(mail: Mail, rank: int, ranks: Sequence[int], value: Any, label: Label = LOADING) -> None:
    """Send a value, or a Failure, to all other ranks."""
    told = Failure(portable(value.error)) if isinstance(value, Failure) else value
    for other in ranks:
        if other != rank:
            mail.tell(other, label, told)


def hear_labelled(mail: Mail, rank: int, source: int, label: Label) -> Any:
    """The next value from a rank; or a Failure.

    Raises HandOverError if it has another label: the ranks are in different requests.
    """
    heard = mail.hear(source)
    if isinstance(heard, Failure):
        return heard
    sent, value = heard
    if sent != label:
        wanted, got = (f"'{name or ''}' of request {request}" for request, name in (label, sent))
        raise HandOverError(
            f"rank {rank} waits for {wanted} from rank {source}, which sent {got}: they are out of step"
        )
    return value


def all_gather(mail: Mail, rank: int, ranks: Sequence[int], value: Any, label: Label = LOADING) -> Any:
    """A value of each of these ranks, in order, or the first Failure among them. All of them must call this."""
    tell_all(mail, rank, ranks, value, label)
    told = [value if other == rank else hear_labelled(mail, rank, other, label) for other in ranks]
    return first_failure(told) or told


class ProcessMail:
    """Values between ranks of this process and of others, with one channel to each other process.

    It receives as long as this process runs, as a process may be connected after all earlier ones are gone; with
    `ends`, until its last channel is gone.
    """

    def __init__(self, ends: bool = False) -> None:
        self._ends = ends
        self._channels: dict[int, Channel] = {}
        self._selector = selectors.DefaultSelector()  # channels come while another thread waits for what arrives
        # What has arrived, by session, source and target: maybe before the target rank has started.
        self._arrived: dict[tuple[int, int, int], SimpleQueue[tuple[Label, Any]]] = {}

    def connect(self, process: int, channel: Channel) -> None:
        """Connect another process, by its number."""
        self._channels[process] = channel
        self._selector.register(channel, selectors.EVENT_READ)
        if len(self._channels) == 1:
            threading.Thread(target=self._listen, name="splitc mail", daemon=True).start()

    def _listen(self) -> None:
        """Receive all values, so that no rank blocks when it sends."""
        try:
            while self._selector.get_map() or not self._ends:
                for key, _ in self._selector.select():
                    self._take(cast(Channel, key.fileobj))
            self._selector.close()
        except BaseException:  # all ranks in this process would wait for ever
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def _take(self, channel: Channel) -> None:
        try:
            for address, told in channel.take():
                self.queue(address).put(told)
        except (EOFError, OSError):  # the sessions notice that the process is gone
            self._selector.unregister(channel)
            channel.close()

    def queue(self, address: tuple[int, int, int]) -> SimpleQueue[tuple[Label, Any]]:
        """The received values for this session, source and target."""
        return self._arrived.get(address) or self._arrived.setdefault(address, SimpleQueue())  # which is atomic

    def tell(self, process: int | None, address: tuple[int, int, int], told: tuple[Label, Any]) -> None:
        """Send a value to a rank of another process, or of this one if `process` is None.

        Raises OSError if the process is gone.
        """
        if process is None:
            self.queue(address).put(told)
        else:
            self._channels[process].send((address, told))

    def finish(self) -> None:
        """Send nothing more. A channel is closed when both ends have said so."""
        for channel in self._channels.values():
            channel.finish()

    def forget(self, session: int, rank: int) -> None:
        """Drop the values for a rank that has ended."""
        for address in [known for known in list(self._arrived) if (known[0], known[2]) == (session, rank)]:
            del self._arrived[address]


class ChannelMail:
    """The mail of one rank of a session. `hosts` are the numbers of all ranks' processes."""

    def __init__(self, mail: ProcessMail, session: int, rank: int, hosts: Sequence[int]) -> None:
        self._mail = mail
        self._session, self._rank = session, rank
        self._hosts = [None if host == hosts[rank] else host for host in hosts]

    def tell(self, target: int, label: Label, value: Any) -> None:
        try:
            self._mail.tell(self._hosts[target], (self._session, self._rank, target), (label, value))
        except OSError as error:
            # The session has noticed it too, and is about to end this process: it knows better why the rank is gone.
            time.sleep(ENDING)
            raise RuntimeError(f"rank {target} is gone") from error

    def hear(self, source: int) -> tuple[Label, Any]:
        return self._mail.queue((self._session, source, self._rank)).get()

    def finish(self) -> None:
        """Receive nothing more."""
        self._mail.forget(self._session, self._rank)
