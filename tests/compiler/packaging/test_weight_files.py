"""Weight files have the bytes of their tensors, and their hashes, however the tensors are cut from their sources."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from blake3 import blake3

from splitc.compiler.analysis.costs import MAPPED_AROUND
from splitc.compiler.graphs.lazy_tensors import CutTensor, JoinedTensor
from splitc.compiler.packaging import writer as package_writer
from splitc.compiler.packaging.writer import WRITE, PackageWriter, WeightFile, in_source_order, write_weight_files
from splitc.runtime.threads.progress import listening

FLOAT, HALF, INT4 = ir.DataType.FLOAT, ir.DataType.BFLOAT16, ir.DataType.INT4


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_writer, "PIECE", 64)
    monkeypatch.setattr(package_writer, "WRITE", 7)


class Data:
    """A file that tensors of random bytes lie in."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._random = np.random.default_rng(0)
        path.write_bytes(b"")

    def tensor(self, dtype: ir.DataType, *shape: int) -> ir.ExternalTensor:
        start, length = self._path.stat().st_size, int(np.prod(shape)) * dtype.bitwidth // 8
        with self._path.open("ab") as file:
            file.write(self._random.bytes(length))
        return ir.ExternalTensor(
            self._path.name, start, length, dtype, shape=ir.Shape(shape), name=f"t{start}", base_dir=self._path.parent
        )


def cut(source: ir.TensorProtocol, places: dict[int, Any]) -> CutTensor:
    shape = [int(size) for size in source.shape.numpy()]
    for number, place in places.items():
        shape[number] = len(np.arange(shape[number])[place])
    return CutTensor(source, places, ir.Shape(shape), "part")


def content(tensors: list[ir.TensorProtocol]) -> bytes:
    return b"".join(tensor.tobytes() for tensor in tensors)


@pytest.mark.parametrize("jobs", [1, 3])
def test_bytes_are_those_of_the_tensors(tmp_path: Path, jobs: int) -> None:
    data = Data(tmp_path / "data")
    small, matrix, wide, experts, packed = (
        data.tensor(FLOAT, 5),
        data.tensor(HALF, 50, 8),
        data.tensor(FLOAT, 2, 200),
        data.tensor(FLOAT, 3, 20, 4),
        data.tensor(INT4, 30, 8),
    )
    memory = ir.tensor(np.arange(600, dtype=np.float32).reshape(20, 30), name="memory")
    some = np.array([0, 1, 5, 18])
    wanted: list[list[ir.TensorProtocol]] = [
        [
            small,
            cut(matrix, {1: slice(0, 3)}),
            cut(matrix, {1: slice(3, 4)}),  # two parts of one source
            cut(wide, {1: slice(0, 150)}),
            cut(experts, {1: some}),
            cut(packed, {1: slice(0, 4)}),
            cut(memory, {0: some, 1: slice(0, 10)}),
        ],
        [
            cut(matrix, {0: np.array([3, 49]), 1: slice(4, 8)}),
            cut(wide, {1: slice(150, 200)}),
            cut(experts, {0: slice(1, 3), 2: np.array([0, 3])}),
            cut(packed, {1: slice(3, 7)}),  # in the middle of bytes
            experts,
            memory,
        ],
        [small, memory, cut(matrix, {1: slice(0, 7)}), matrix],  # more is cut from a piece than it has bytes
        [JoinedTensor([matrix, cut(matrix, {1: slice(0, 3)})], 1, "wide"), JoinedTensor([matrix, matrix], 0, "long")],
    ]
    files = [WeightFile(tmp_path / str(n), tuple(in_source_order(each))) for n, each in enumerate(wanted)]
    writer = PackageWriter(tmp_path)
    told: list[tuple[float, int]] = []
    with listening(lambda what, done, total: told.append((done, total))):
        write_weight_files(files, writer, jobs)
    for file, entry in zip(files, writer.files):
        assert file.path.read_bytes() == content(list(file.tensors))
        assert entry.blake3 == blake3(file.path.read_bytes()).hexdigest()
    assert told == sorted(told)
    assert told[-1] == (sum(file.path.stat().st_size for file in files),) * 2


def test_model_file_that_was_truncated(tmp_path: Path) -> None:
    data = Data(tmp_path / "data")
    first, last = data.tensor(FLOAT, 1000), data.tensor(FLOAT, 1000)
    with (tmp_path / "data").open("r+b") as file:
        file.truncate(6000)
    files = [WeightFile(tmp_path / "0", (first,)), WeightFile(tmp_path / "1", (last,))]
    before = threading.active_count()
    with pytest.raises(OSError, match="the file was truncated while it was read"):
        write_weight_files(files, PackageWriter(tmp_path), 2)
    assert threading.active_count() == before


def test_interrupt_ends_all_threads(tmp_path: Path) -> None:
    data = Data(tmp_path / "data")
    source = data.tensor(FLOAT, 1000, 8)
    files = [WeightFile(tmp_path / str(n), (cut(source, {1: slice(n, n + 1)}),)) for n in range(8)]
    before, done = threading.active_count(), list[float]()

    def interrupt(what: str, count: float, total: int) -> None:
        if count:
            done.append(count)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), listening(interrupt):
        write_weight_files(files, PackageWriter(tmp_path), 2)
    assert len(done) <= len(files), "a piece of each, since each ends"
    assert threading.active_count() == before


def test_no_more_is_mapped_around_a_row_of_a_table_than_counts() -> None:
    assert WRITE <= MAPPED_AROUND
