"""What ranks that are processes tell each other, by a channel for each pair."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import wait
from queue import SimpleQueue
from typing import Any, Protocol

from splitc.runtime.channel import Channel

# Seconds in which a session ends the processes of all ranks if that of one has ended.
ENDING = 5.0


class Mail(Protocol):
    """A rank's end of what ranks tell each other. What one tells another comes in order."""

    def tell(self, target: int, name: str | None, value: Any) -> None:
        """Tell a rank a value. Does not wait until it hears it. Raises RuntimeError if it is gone."""

    def hear(self, source: int) -> tuple[str | None, Any]:
        """Wait for the next value of a rank, and its name."""


class ChannelMail:
    """Mail by channels, by the number of the other rank."""

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

    def tell(self, target: int, name: str | None, value: Any) -> None:
        try:
            self._channels[target].send((name, value))
        except OSError as error:
            # The session has noticed it too, and is about to end this process: it knows better why the rank is gone.
            time.sleep(ENDING)
            raise RuntimeError(f"rank {target} is gone") from error

    def hear(self, source: int) -> tuple[str | None, Any]:
        name, value = self._arrived[source].get()
        return name, value
