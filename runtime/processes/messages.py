"""The messages between a session and the processes of its ranks."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder

from splitc.runtime.arrays.array import Zeros
from splitc.runtime.gpu.weight_places import SwapBuffer
from splitc.runtime.hardware.devices import Device
from splitc.runtime.hardware.memory_use import RankMemory
from splitc.runtime.ipc.shared_memory import SharedArrays

# In place of a step's number: a CUDA graph was replayed, or captured and replayed.
REPLAYED, CAPTURED = -1, -2


class Start(Struct, frozen=True, array_like=True, tag=True):
    """The start of a rank. Descriptors come with it: that of the socket to the session, then those named below.

    - `hosts`: the numbers of all ranks' processes.
    - `peers`: the processes that the rank's own is not yet connected with. A socket to each comes with it.
    - `meetings`: the groups whose engines meet. The memory of each comes with it.
    - `by_nccl`: each rank has its own GPU.
    - `spin`: the seconds that a rank polls for work before it sleeps.
    - `swap`, `share`: see Setup.
    """

    session: int
    package: Path
    number: int
    hosts: tuple[int, ...]
    devices: tuple[Device, ...]
    threads: int
    cuda_graphs: bool
    peers: tuple[int, ...]
    meetings: tuple[tuple[int, ...], ...]
    by_nccl: bool
    spin: float
    swap: SwapBuffer | None
    share: int | None


class Order(Struct, frozen=True, array_like=True, tag=True):
    """A request.

    - `arrays`: the first `fed` of them are its feeds, the others initial states that are not zeros.
    - `sequence`, `in_place`, `after`, `growth`: see InFlightRequest.
    - `adapters`: the number of its HeldSum, whose arrays are among the initial states in the first request with it.
    - `unused`: the buffers that each rank may use again.
    """

    number: int
    arrays: SharedArrays | None
    fed: int
    zeros: dict[str, Zeros]
    sequence: int | None
    in_place: bool
    after: int | None
    growth: int
    adapters: int | None
    unused: tuple[tuple[int, ...], ...]


class Forget(Struct, frozen=True, array_like=True, tag=True):
    """Free the states of a sequence, or keep them for another one if `reusable`.

    Or free the sum of adapters with this number.
    """

    sequence: int
    reusable: bool


class BringIn(Struct, frozen=True, array_like=True, tag=True):
    """Copy swapped weights in."""


class Ask(Struct, frozen=True, array_like=True, tag=True):
    """Asks for a Report."""


class Loaded(Struct, frozen=True, array_like=True, tag=True):
    """A rank has loaded its engines, or failed to. `files` are those that NCCL may leave behind."""

    error: BaseException | None
    files: tuple[str, ...] = ()


class Report(Struct, frozen=True, array_like=True, tag=True):
    """A rank's memory, None before it is loaded, and messages for the user."""

    memory: RankMemory | None
    notes: tuple[str, ...]


class Answer(Struct, frozen=True, array_like=True, tag=True):
    """A rank has finished a request.

    `spans` has, for each step that ran, its number in the rank's program, or REPLAYED or CAPTURED, and its times. For
    `grew` see Execution.
    """

    number: int
    outputs: SharedArrays | None
    start: float
    end: float
    spans: tuple[tuple[int, float, float], ...]
    grew: bool
    error: BaseException | None


class Broken(Struct, frozen=True, array_like=True, tag=True):
    """A rank can't go on; if the error belongs to a `request`, unless all other ranks fail in that request too."""

    error: BaseException
    request: int | None


def _flatten(value: Any) -> Any:
    """A value of a message as a type that msgspec encodes."""
    return pickle.dumps(value) if isinstance(value, BaseException) else os.fsencode(value)


def _restore(kind: Any, value: Any) -> Any:
    return pickle.loads(value) if kind is BaseException else kind(os.fsdecode(value))


class Ended(Struct, frozen=True, array_like=True, tag=True):
    """A rank has ended, and freed its memory. Its process goes on if it has other ranks."""


# None says that there are no more.
Message = Start | Order | Forget | BringIn | Ask | Loaded | Report | Answer | Broken | Ended | None
_encoder = Encoder(enc_hook=_flatten)
_decoder: Decoder[Message] = Decoder(Message, dec_hook=_restore)


def pack(message: Message | list[bytes]) -> list[bytes]:
    """A message as the pieces that a channel sends. Packed messages are returned unchanged."""
    return message if isinstance(message, list) else [_encoder.encode(message)]


def unpack(packed: bytearray) -> Message:
    """The message in these bytes."""
    return _decoder.decode(packed)
