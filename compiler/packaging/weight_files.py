"""Writes files of weights: several at once, each tensor in pieces from a memory map of its source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import onnx_ir as ir

from splitc.compiler.frontend.lazy_tensors import CutTensor, Indices, JoinedTensor, as_slice, take
from splitc.compiler.packaging.writer import PackageWriter
from splitc.runtime.arrays.array import Array
from splitc.runtime.threads.futures import Executor, first_error
from splitc.runtime.threads.progress import Bytes, counting

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
