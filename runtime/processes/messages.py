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
    """What a rank needs to know. With it come descriptors: that of the socket to the session, and then as below.

    `hosts` are the numbers of all ranks' processes, `peers` those that its own is not yet connected with, with a socket
    to each, `meetings` the groups whose engines meet, with the memory where they do. With `by_nccl`, each rank has a
    GPU of its own. A rank polls for work for `spin` seconds before it sleeps. For `swap` see Setup.
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


class Order(Struct, frozen=True, array_like=True, tag=True):
    """A request. The first `fed` arrays are its feeds, the others initial states that are not zeros.

    For `sequence`, `in_place`, `after` and `growth` see InFlightRequest. `adapters` is the number of its HeldSum, whose
    arrays are among the initial states if this request is the first that has it. `unused` are the buffers of each
    rank that it may use again.
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
    """Free the states of a sequence, or let another one begin in their memory: if they are `reusable`.

    Or free the sum of adapters of this number.
    """

    sequence: int
    reusable: bool


class BringIn(Struct, frozen=True, array_like=True, tag=True):
    """Bring the weights in, whose memory other models had."""


class Ask(Struct, frozen=True, array_like=True, tag=True):
    """Asks for a Report."""


class Loaded(Struct, frozen=True, array_like=True, tag=True):
    """A rank has loaded its engines, or could not. `files` are those that NCCL may leave behind."""

    error: BaseException | None
    files: tuple[str, ...] = ()


class Report(Struct, frozen=True, array_like=True, tag=True):
    """The memory of a rank's GPU, None for a CPU device, and messages for the user."""

    memory: RankMemory | None
    notes: tuple[str, ...]


class Answer(Struct, frozen=True, array_like=True, tag=True):
    """A rank has finished a request.

    `spans` has, for each step that ran, its number in the rank's program, or else REPLAYED or CAPTURED, and when it
    ran. For `grew` see Execution.
    """

    number: int
    outputs: SharedArrays | None
    start: float
    end: float
    spans: tuple[tuple[int, float, float], ...]
    grew: bool
    error: BaseException | None


class Broken(Struct, frozen=True, array_like=True, tag=True):
    """A rank can't go on, unless all other ranks fail in `request` too, if its error is of one."""

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
    """A message as the pieces that a channel sends, unless it is that already."""
    return message if isinstance(message, list) else [_encoder.encode(message)]


def unpack(packed: bytearray) -> Message:
    """The message of these bytes."""
    return _decoder.decode(packed)
