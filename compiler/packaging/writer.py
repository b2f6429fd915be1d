"""Writes the files of a package, and hashes them while they are written, so that nothing is read again.

Files of weights are written several at once, each tensor in pieces from a memory map of its source.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx_ir as ir
from blake3 import blake3

from splitc.compiler.graphs.lazy_tensors import CutTensor, Indices, JoinedTensor, as_slice, take
from splitc.runtime.arrays.array import Array
from splitc.runtime.errors import SplitcError
from splitc.runtime.files.written import try_link
from splitc.runtime.package.manifest import File
from splitc.runtime.threads.futures import Executor, first_error
from splitc.runtime.threads.progress import Bytes, counting

# The bytes that are written at a time. For larger writes Linux takes larger blocks of its page cache. A virtual machine
# has often returned these to its host, and writing takes two to four times as long while it gets them back. From Linux
# 6.18 on, it maps the whole block around a byte that is read (see MAPPED_AROUND).
WRITE = 1 << 16


class HashedFile:
    """A file that is only appended to, with its size and hash."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = blake3()
        self.size = 0

    def write(self, content: bytes | memoryview) -> int:
        """Hash and write the content."""
        view = memoryview(content).cast("B")
        self._digest.update(view)
        for start in range(0, len(view), WRITE):
            self._file.write(view[start : start + WRITE])
        self.size += len(view)
        return len(view)

    @property
    def hash(self) -> str:
        """The BLAKE3 hash of the content so far, in hexadecimal."""
        return self._digest.hexdigest()


class PackageWriter:
    """Writes into a folder that becomes a package."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[Path, File] = {}
        self._stopped = False

    @property
    def files(self) -> list[File]:
        """The files written so far, sorted by path."""
        return [self._files[path] for path in sorted(self._files)]

    @contextmanager
    def open(self, path: Path) -> Iterator[HashedFile]:
        """Open a new file for writing."""
        with path.open("wb") as file:
            hashed = HashedFile(file)
            yield hashed
        self._files[path] = File(self._name(path), hashed.size, blake3=hashed.hash)

    def stop(self) -> None:
        """Let writing threads end soon."""
        self._stopped = True

    def check_stopped(self) -> None:
        """Raise SplitcError after `stop`."""
        if self._stopped:
            raise SplitcError("writing the package was stopped")

    def write(self, path: Path, content: bytes) -> None:
        """Write a new file with this content."""
        with self.open(path) as file:
            file.write(content)

    def copy(self, source: Path, target: Path) -> None:
        """Write a new file with the content of another."""
        with source.open("rb") as original, self.open(target) as copy:
            shutil.copyfileobj(original, copy, 1 << 20)

    def link(self, source: Path, target: Path) -> bool:
        """Make `target` a hard link to `source`, without a hash. If that is impossible, copy it and return False."""
        if not try_link(source, target):
            self.copy(source, target)
            return False
        status = target.stat()
        self._files[target] = File(self._name(target), status.st_size, inode=status.st_ino, modified=status.st_mtime_ns)
        return True

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()


# The bytes that are cut, hashed and written at a time: they stay in a core's own cache meanwhile.
PIECE = 1 << 20


@dataclass(frozen=True)
class WeightFile:
    """A file to write: the bytes of these tensors one after the other."""

    path: Path
    tensors: tuple[ir.TensorProtocol, ...]


def in_source_order(tensors: Iterable[ir.TensorProtocol]) -> list[ir.TensorProtocol]:
    """Tensors in the order of their sources in the model's files, so that these are read sequentially."""
    return sorted(tensors, key=_place)


def _place(tensor: ir.TensorProtocol) -> tuple[str, int, int, tuple[int, ...], int]:
    """A sort key: the file, first byte, bytes and shape of a tensor's source; in memory its name and id."""
    source = _source(tensor.parts[0] if isinstance(tensor, JoinedTensor) else tensor)
    shape = _shape(source)
    if isinstance(source, ir.ExternalTensor):
        return str(source.path), source.offset or 0, source.nbytes, shape, 0
    return source.name or "", 0, 0, shape, id(source)


def _source(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """The tensor that the bytes are cut from: the tensor itself if it is not cut, or if it is cut within bytes."""
    return tensor.source if isinstance(tensor, CutTensor) and _is_between_bytes(tensor) else tensor


def _shape(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    return tuple(map(int, tensor.shape.numpy()))


def write_weight_files(files: Sequence[WeightFile], writer: PackageWriter, jobs: int = 1) -> None:
    """Write the files, `jobs` of them at once.

    Raises OSError for a file that can't be written, and for a source that was truncated.
    """
    count = counting("writing weights", Bytes(sum(tensor.nbytes for file in files for tensor in file.tensors)))
    with Executor(jobs, "splitc writes") as pool:
        writes = [pool.submit(_write, file, writer, count) for file in files]
        try:
            if (error := first_error(writes)) is not None:
                raise error
        except BaseException:
            writer.stop()
            pool.shutdown(cancel_futures=True)
            raise


def _write(file: WeightFile, writer: PackageWriter, count: Callable[[int], None]) -> None:
    with writer.open(file.path) as target:
        for tensor in chain.from_iterable(map(_in_turn, file.tensors)):
            for piece in _pieces(_elements(_source(tensor)), _places(tensor)):
                writer.check_stopped()
                if piece.size:
                    count(target.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data))


def _in_turn(tensor: ir.TensorProtocol) -> Sequence[ir.TensorProtocol]:
    """The tensors whose bytes, one after the other, are the tensor's."""
    return tensor.parts if isinstance(tensor, JoinedTensor) and tensor.axis == 0 else (tensor,)


def _pieces(array: Array, places: Mapping[int, Indices]) -> Iterator[Array]:
    """The elements at these indices along some axes, in order, in pieces of up to PIECE bytes of the array."""
    if array.nbytes <= PIECE or not array.ndim:
        yield take(array, places)
        return
    indices = places.get(0, slice(None))
    rows = range(len(array))[indices] if isinstance(indices, slice) else indices
    size = array.nbytes // len(array)
    if size > PIECE:
        inner = {number - 1: indices for number, indices in places.items() if number}
        for row in rows:
            yield from _pieces(array[row], inner)
        return
    count = PIECE // size
    for part in (rows[start : start + count] for start in range(0, len(rows), count)):
        own = slice(part.start, part.stop) if isinstance(part, range) else as_slice(part)
        yield take(array, {**places, 0: own})


def _elements(source: ir.TensorProtocol) -> Array:
    """A tensor's elements as unsigned integers of their size; or its bytes, if elements share one. A file is mapped.

    The types of ml_dtypes would be slow to move.
    """
    in_byte, size = _elements_in_byte(source), max(1, source.dtype.bitwidth // 8)
    shape = _shape(source)
    kind = np.dtype(f"u{size}" if size <= 8 else f"V{size}")
    if in_byte > 1 and (not shape or shape[-1] % in_byte):
        shape = (source.nbytes,)  # it is written whole
    elif in_byte > 1:
        shape = (*shape[:-1], shape[-1] // in_byte)
    if isinstance(source, ir.ExternalTensor) and source.nbytes:
        path, start = Path(source.path), source.offset or 0
        if path.stat().st_size < start + source.nbytes:
            raise OSError(0, "the file was truncated while it was read", str(path))
        mapped: Array = np.memmap(path, kind, "r", start, shape)
        return mapped
    if in_byte > 1:
        return np.frombuffer(source.tobytes(), np.uint8).reshape(shape)
    return np.ascontiguousarray(source.numpy()).view(kind).reshape(shape)


def _elements_in_byte(tensor: ir.TensorProtocol) -> int:
    return max(1, 8 // tensor.dtype.bitwidth)


def _is_between_bytes(tensor: CutTensor) -> bool:
    """Whether the tensor is cut between bytes of its source, and not within one."""
    in_byte, length = _elements_in_byte(tensor), _shape(tensor.source)[-1]
    last = tensor.places.get(len(tensor.source.shape) - 1, slice(0, length))
    return in_byte == 1 or (
        isinstance(last, slice) and last.start % in_byte == last.stop % in_byte == length % in_byte == 0
    )


def _places(tensor: ir.TensorProtocol) -> Mapping[int, Indices]:
    """The indices of a tensor's elements in its source, or of its bytes if several elements share one."""
    if not isinstance(tensor, CutTensor) or not _is_between_bytes(tensor):
        return {}
    in_byte, last = _elements_in_byte(tensor), len(tensor.source.shape) - 1
    indices = tensor.places.get(last)
    if in_byte == 1 or not isinstance(indices, slice):
        return tensor.places
    return {**tensor.places, last: slice(indices.start // in_byte, indices.stop // in_byte)}
