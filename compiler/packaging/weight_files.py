"""Write files of weights: several side by side, and each source read once, whatever the number of files it is cut for.

A piece of a source is in memory at a time, and a few more until they are written.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from splitc.compiler.packaging.package_writer import HashedFile, PackageWriter
from splitc.compiler.sharding.cut_tensor import CutTensor, Indices, as_slice, take
from splitc.runtime.threads.executor import Executor
from splitc.runtime.threads.futures import first_error

# The bytes of a source that are read at a time, for each file that they may go to: what stays in a core's own cache
# until it is written; and the most bytes. Pieces of groups of files that are read before the first is written.
PIECE, MOST, AHEAD = 1 << 20, 1 << 22, 4

# Called with the bytes that are written, and with those of all.
Progress = Callable[[int, int], None]
Bytes = npt.NDArray[np.uint8]
# Where a source lies: its file, the first byte and the number of bytes, and its shape; in memory its name and id.
_Place = tuple[str, int, int, tuple[int, ...], int]


@dataclass(frozen=True)
class WeightFile:
    """A file to write, which has the bytes of these tensors one after the other."""

    path: Path
    tensors: tuple[ir.TensorProtocol, ...]


def in_source_order(tensors: Iterable[ir.TensorProtocol]) -> list[ir.TensorProtocol]:
    """Tensors in the order in which their sources lie in the model's files, in which these are read."""
    return sorted(tensors, key=_place)


def _place(tensor: ir.TensorProtocol) -> _Place:
    source = _source(tensor)
    shape = tuple(map(int, source.shape.numpy()))
    if isinstance(source, ir.ExternalTensor):
        return str(source.path), source.offset or 0, source.nbytes, shape, 0
    return source.name or "", 0, 0, shape, id(source)


def _source(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """What the tensor's bytes are cut out of. The tensor itself if it is not cut, or not between bytes."""
    return tensor.source if isinstance(tensor, CutTensor) and _is_between_bytes(tensor) else tensor


def write_weight_files(
    files: Sequence[WeightFile],
    writer: PackageWriter,
    jobs: int = 1,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write the files, `jobs` groups of them at once. `progress` is called by threads, after each piece."""
    count = _Counter(sum(tensor.nbytes for file in files for tensor in file.tensors), progress)
    with Executor(jobs, "splitc writes") as pool:
        groups = [pool.submit(_write_together, group, writer, count.add) for group in _groups(files)]
        try:
            if (error := first_error(groups)) is not None:
                raise error
        except BaseException:
            writer.stop()
            pool.shutdown(cancel_futures=True)
            raise


class _Counter:
    """Counts bytes of several threads."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._lock, self._done, self._total, self._progress = threading.Lock(), 0, total, progress

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._progress(self._done, self._total)


def _groups(files: Sequence[WeightFile]) -> list[list[WeightFile]]:
    """Files with parts of the same sources together, so that these are read once."""
    groups: list[tuple[set[Any], list[WeightFile]]] = []
    for file in files:
        sources = {_place(tensor) for tensor in file.tensors if isinstance(tensor, CutTensor)}
        joined = [group for group in groups if not sources.isdisjoint(group[0])]
        groups = [group for group in groups if group not in joined]
        members = [member for _, each in joined for member in each]
        groups.append((sources.union(*(each for each, _ in joined)), [*members, file]))
    return [members for _, members in groups]


def _write_together(files: Sequence[WeightFile], writer: PackageWriter, count: Callable[[int], None]) -> None:
    """Write files in one pass over their sources."""
    with ExitStack() as stack:
        opened = [stack.enter_context(writer.open(file.path, threaded=len(files) > 1)) for file in files]
        size = min(MOST, PIECE * len(files))
        reader = stack.enter_context(_Reader())
        for takers in _rounds(opened, files):
            cuts = [(file, _cut_of(tensor)) for file, tensor in takers]
            row = max(cut.row if cut else 1 for _, cut in cuts)
            for start, piece in reader.pieces(_source(takers[0][1]), max(1, size // row) * row):
                writer.check_stopped()
                for file, cut in cuts:
                    part = piece if cut is None else reader.in_order(cut.take(piece, start))
                    if part.size:
                        reader.hold(file.append(part.data))
                        count(part.nbytes)
        reader.wait()


def _rounds(
    opened: Sequence[HashedFile], files: Sequence[WeightFile]
) -> Iterator[list[tuple[HashedFile, ir.TensorProtocol]]]:
    """The sources in turn: files that have a part of the next one, and this part."""
    parts_of = (deque((_place(tensor), tensor) for tensor in file.tensors) for file in files)
    left = dict(zip(opened, parts_of, strict=True))
    while left := {file: parts for file, parts in left.items() if parts}:
        place = min(parts[0][0] for parts in left.values())
        yield [(file, parts.popleft()[1]) for file, parts in left.items() if parts[0][0] == place]


class _Buffer:
    """Memory for a piece of a source, and for what is cut out of it. It is used again when the writes are done."""

    def __init__(self) -> None:
        self.writes: list[Future[int]] = []
        self._piece = self._cuts = np.empty(0, np.uint8)
        self._used = 0

    def wait(self) -> None:
        """Wait until all is written. Raises the error of a write."""
        for write in self.writes:
            write.result()

    def piece(self, size: int) -> Bytes:
        """Memory for a new piece. What was in the buffer is lost."""
        self.writes, self._used = [], 0
        if self._piece.size < size:
            self._piece = np.empty(size, np.uint8)
        return self._piece[:size]

    def in_order(self, part: npt.NDArray[Any]) -> Bytes:
        """The part's bytes one after the other. They are copied if they do not lie so."""
        if part.flags.c_contiguous:
            return part.reshape(-1).view(np.uint8)
        if self._used + part.nbytes > self._cuts.size:  # what was cut already is kept by its writes
            self._cuts, self._used = np.empty(max(self._piece.size, part.nbytes), np.uint8), 0
        target = self._cuts[self._used : self._used + part.nbytes]
        self._used += part.nbytes
        target.view(part.dtype).reshape(part.shape)[...] = part
        return target


class _Reader:
    """Reads sources into a few buffers, which are filled again when all that refers to them has been written."""

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._buffers: deque[_Buffer] = deque()

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def hold(self, write: Future[int] | None) -> None:
        """Keep the last piece until this is written; None if it is."""
        if write is not None:
            self._buffers[-1].writes.append(write)

    def in_order(self, part: npt.NDArray[Any]) -> Bytes:
        """The bytes one after the other of a part that is cut out of the last piece."""
        return self._buffers[-1].in_order(part)

    def wait(self) -> None:
        """Wait until all is written. Raises the error of a write."""
        for buffer in self._buffers:
            buffer.wait()

    def pieces(self, source: ir.TensorProtocol, size: int) -> Iterator[tuple[int, Bytes]]:
        """The source's bytes in pieces of this size, and the place of each one's first byte in it."""
        external = isinstance(source, ir.ExternalTensor)
        content = np.empty(0, np.uint8) if external else _bytes(source)
        for start in range(0, source.nbytes, size):
            length = min(size, source.nbytes - start)
            piece = self._next(length if external else 0)
            if isinstance(source, ir.ExternalTensor):
                self._read(Path(source.path), (source.offset or 0) + start, piece)
            yield start, piece if external else content[start : start + length]

    def _next(self, size: int) -> Bytes:
        """Memory of `size` bytes: the oldest buffer's, after its writes, if all are in use."""
        free = len(self._buffers) == AHEAD or (self._buffers and not self._buffers[-1].writes)
        buffer = self._buffers.popleft() if free else _Buffer()
        buffer.wait()
        self._buffers.append(buffer)
        return buffer.piece(size)

    def _read(self, path: Path, start: int, target: Bytes) -> None:
        if self._file is None or self._file.name != str(path):
            if self._file is not None:
                self._file.close()
            self._file = path.open("rb", buffering=0)
        self._file.seek(start)
        done = 0
        while done < target.size:
            count = self._file.readinto(target[done:].data)  # type: ignore[attr-defined]
            if not count:
                raise OSError(0, "it has become shorter while it was read", str(path))
            done += count


def _bytes(tensor: ir.TensorProtocol) -> Bytes:
    if tensor.dtype.bitwidth < 8:
        return np.frombuffer(tensor.tobytes(), np.uint8)
    return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)


@dataclass(frozen=True)
class _Cut:
    """Which bytes of a source a tensor has: of these rows, of `row` bytes each, the `places` in arrays of `shape`."""

    row: int
    rows: npt.NDArray[np.int64] | None
    shape: tuple[int, ...]
    type: np.dtype[Any]
    places: dict[int, Indices]

    def take(self, piece: Bytes, start: int) -> npt.NDArray[Any]:
        """The tensor's elements in a piece of whole rows that begins at byte `start` of the source."""
        block = piece.view(self.type).reshape(-1, *self.shape)
        if self.rows is not None:
            first = start // self.row
            low, high = np.searchsorted(self.rows, (first, first + len(block)))
            block = take(block, {0: as_slice(self.rows[low:high] - first)})
        return take(block, self.places)


def _is_between_bytes(tensor: CutTensor) -> bool:
    """Whether the tensor has all elements of each byte of its source that it has one of."""
    in_byte, length = max(1, 8 // tensor.dtype.bitwidth), int(tensor.source.shape.numpy()[-1])
    last = tensor.places.get(len(tensor.source.shape) - 1, slice(0, length))
    return in_byte == 1 or (
        isinstance(last, slice) and last.start % in_byte == last.stop % in_byte == length % in_byte == 0
    )


def _cut_of(tensor: ir.TensorProtocol) -> _Cut | None:
    """How the tensor is cut out of its source in rows; None if its source is itself."""
    if not isinstance(tensor, CutTensor) or not _is_between_bytes(tensor):
        return None
    shape, places = [int(size) for size in tensor.source.shape.numpy()], dict(tensor.places)
    in_byte, size = max(1, 8 // tensor.dtype.bitwidth), max(1, tensor.dtype.bitwidth // 8)
    if in_byte > 1:
        last = places.get(len(shape) - 1)
        shape[-1] //= in_byte
        if isinstance(last, slice):
            places[len(shape) - 1] = slice(last.start // in_byte, last.stop // in_byte)
    # Rows go over as many leading axes as it takes to have one in a piece.
    leading = next(n for n in range(1, len(shape) + 1) if size * math.prod(shape[n:]) <= MOST)
    rows = None
    if any(number < leading for number in places):
        rows = np.zeros(1, np.int64)
        for number, length in enumerate(shape[:leading]):
            own = np.arange(length)[places.get(number, slice(None))]
            rows = (rows[:, None] * length + own[None, :]).reshape(-1)
    inner = tuple(shape[leading:])
    kept = {number - leading + 1: place for number, place in places.items() if number >= leading}
    # Elements are moved as numbers: those of the types of ml_dtypes are slow to move.
    kind = np.dtype(f"u{size}" if size <= 8 else f"V{size}")
    return _Cut(size * math.prod(inner), rows, inner, kind, kept)
