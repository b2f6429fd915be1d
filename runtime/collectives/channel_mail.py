"""What ranks that are processes tell each other, by a channel for each pair that does."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from queue import SimpleQueue
from typing import Any, Protocol

from splitc.runtime.collectives import LOADING, Label, check_label
from splitc.runtime.ipc.channel import Channel, portable
from splitc.runtime.threads.failures import Failure

# Seconds in which a session ends the processes of all ranks if that of one has ended.
ENDING = 5.0


class Mail(Protocol):
    """A rank's end of what ranks tell each other. What one tells another comes in order."""

    def tell(self, target: int, label: Label, value: Any) -> None:
        """Tell a rank a value. Does not wait until it hears it. Raises RuntimeError if it is gone."""

    def hear(self, source: int) -> tuple[Label, Any]:
        """Wait for the next value of a rank, and its label."""


def tell_all(mail: Mail, rank: int, ranks: Sequence[int], value: Any, label: Label = LOADING) -> None:
    """Tell all other ranks a value, or a Failure."""
    told = Failure(portable(value.error)) if isinstance(value, Failure) else value
    for other in ranks:
        if other != rank:
            mail.tell(other, label, told)


def hear_labelled(mail: Mail, rank: int, source: int, label: Label) -> Any:
    """The next value of a rank, which must have this label."""
    sent, value = mail.hear(source)
    check_label(sent, label, rank, source)
    return value


def all_gather(mail: Mail, rank: int, ranks: Sequence[int], value: Any, label: Label = LOADING) -> Any:
    """See Collectives.all_gather."""
    tell_all(mail, rank, ranks, value, label)
    told = [value if other == rank else hear_labelled(mail, rank, other, label) for other in ranks]
    return next((each for each in told if isinstance(each, Failure)), told)


def gather_by_first(mail: Mail, rank: int, ranks: Sequence[int], value: Any) -> Any:
    """As `all_gather` before all requests, by way of the first of the ranks: the others need none to each other."""
    first = ranks[0]
    if rank != first:
        tell_all(mail, rank, [first], value)
        return hear_labelled(mail, rank, first, LOADING)
    told = [value, *(hear_labelled(mail, first, other, LOADING) for other in ranks[1:])]
    gathered = next((each for each in told if isinstance(each, Failure)), told)
    tell_all(mail, first, ranks, gathered)
    return gathered


class ChannelMail:
    """Mail by channels, by the number of the other rank. They are closed when both ends have nothing more to tell."""

    def __init__(self, channels: Mapping[int, Channel]) -> None:
        self._channels = channels
        self._arrived: dict[int, SimpleQueue[Any]] = {source: SimpleQueue() for source in channels}
        threading.Thread(target=self._listen, name="splitc channels", daemon=True).start()

    def _listen(self) -> None:
        """Take what arrives off the channels, so that no rank ever waits until it can send."""
        sources = {channel.fileno(): source for source, channel in self._channels.items()}
        while sources:
            for descriptor in wait(list(sources)):
                assert isinstance(descriptor, int)
                source = sources[descriptor]
                try:
                    for message in self._channels[source].take():
                        self._arrived[source].put(message)
                except (EOFError, OSError):  # the session notices that the rank is gone
                    del sources[descriptor]
                    self._channels[source].close()

    def finish(self) -> None:
        """Tell nothing more."""
        for channel in self._channels.values():
            channel.finish()

    def tell(self, target: int, label: Label, value: Any) -> None:
        try:
            self._channels[target].send((label, value))
        except OSError as error:
            # The session has noticed it too, and is about to end this process: it knows better why the rank is gone.
            time.sleep(ENDING)
            raise RuntimeError(f"rank {target} is gone") from error

    def hear(self, source: int) -> tuple[Label, Any]:
        label, value = self._arrived[source].get()
        return label, value
