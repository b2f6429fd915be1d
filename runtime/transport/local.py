"""Ranks that are threads of one process: a value is handed on as it is."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

Channels = dict[tuple[int, int], "SimpleQueue[tuple[str, Any]]"]


class LocalTransport:
    """The end that belongs to `rank` of channels which all ranks of a session share."""

    def __init__(self, rank: int, channels: Channels) -> None:
        self._rank = rank
        self._channels = channels

    def send(self, target: int, name: str, value: Any) -> None:
        self._channels[self._rank, target].put((name, value))

    def receive(self, source: int, name: str) -> Any:
        sent, value = self._channels[source, self._rank].get()
        if sent != name:
            raise RuntimeError(f"rank {self._rank} waits for '{name}' from rank {source}, which sent '{sent}'")
        return value


def connect(ranks: int) -> list[LocalTransport]:
    """The ends of a new set of channels, one a rank."""
    channels: Channels = {(source, target): SimpleQueue() for source in range(ranks) for target in range(ranks)}
    return [LocalTransport(rank, channels) for rank in range(ranks)]
