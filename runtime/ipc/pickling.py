"""Messages as pickles, with long arrays beside them: neither sender nor receiver copies these."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

# Pieces of a message, in order.
Pieces = Sequence[bytes | memoryview]
# Bytes of a number, and of the longest array that is part of a pickle.
NUMBER, LONGEST = 8, 1 << 16
# Arrays begin at multiples of so many bytes in a message, as vector instructions like it.
ALIGNMENT = 64


def pickled(message: Any) -> Pieces:
    """A message as pieces: the number of its long arrays, the sizes of the rest if there are any, a pickle, the arrays.

    The arrays are not copied.
    """
    arrays: list[memoryview] = []

    def is_short(array: pickle.PickleBuffer) -> bool:
        raw = array.raw()
        if len(raw) > LONGEST:
            arrays.append(raw)
        return len(raw) <= LONGEST

    packed = pickle.dumps(message, protocol=5, buffer_callback=is_short)
    if not arrays:
        return [bytes(NUMBER), packed]
    pieces: list[bytes | memoryview] = [packed, *arrays]
    sizes = struct.pack(f"<{1 + len(pieces)}Q", len(arrays), *map(len, pieces))
    return [part for piece in [sizes, *pieces] for part in (piece, bytes(-len(piece) % ALIGNMENT))]


def unpickled(packed: bytearray) -> Any:
    """The message in these bytes. Its long arrays are views of them."""
    whole = memoryview(packed)
    (count,) = struct.unpack_from("<Q", packed)
    if not count:
        return pickle.loads(whole[NUMBER:])
    sizes = NUMBER * (2 + count), *struct.unpack_from(f"<{1 + count}Q", packed, NUMBER)
    starts = accumulate((size + -size % ALIGNMENT for size in sizes), initial=0)
    _, message, *arrays = (whole[start : start + size] for start, size in zip(starts, sizes, strict=False))
    return pickle.loads(message, buffers=arrays)
