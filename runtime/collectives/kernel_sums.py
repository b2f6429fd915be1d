"""All-reduces over GPUs of one machine by kernels of our own, where each GPU can write to the others' memory.

Small sums are one-shot (`native/one_shot.cu`): each rank sends its whole part to all others. Large ones are two-shot
(`native/two_shot.cu`): a reduce-scatter and an all-gather. NCCL's ring takes more steps. All ranks add in the same
order, so they get the same bits.

Buffers are double: a rank can't be two sums ahead, since to end a sum it needs the data of all others, which they send
when they have ended the one before.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from splitc.runtime.engines.operator_library import load_library
from splitc.runtime.errors import EngineError
from splitc.runtime.gpu.array import GpuArray
from splitc.runtime.gpu.device import GpuDevice
from splitc.runtime.threads.failures import Failure, attempt

# The most ranks: the GPUs of usual hosts with NVLink. The kernels have arrays of as many (native/sums.cuh).
MOST_RANKS = 8
# Small sums: threads of a block, and the bytes that each one sums.
SMALL_THREADS, WIDTH = 128, 8
# Large ones: blocks, their threads, the bytes of a word, and of a sum: larger ones are several. An H100 runs 132 blocks
# at once, and a word is the most that a thread moves at once; other numbers were not measured.
LARGE_BLOCKS, LARGE_THREADS, WORD, LARGE = 128, 512, 16, 8 << 20
# The most bytes: NCCL is as fast for larger sums (see `small_bytes`).
MOST = 16 << 20
# Seconds that a GPU waits for the others in a sum, and in the sums that test the connection.
PATIENCE, TEST_PATIENCE = 120.0, 10.0
# Bytes of a small sum's place, a thread's data and flags; of an epoch, the number of a sum.
PLACE, EPOCH = 16, 4
# The kernels' number types, in the order that the C library has them, and ONNX's codes.
TYPES = ("float", "half", "bfloat16")
CODES = {"float32": 1, "float16": 10, "bfloat16": 16}
NATIVE = Path(__file__).parent / "native"
SOURCES = ("sums.cuh", "one_shot.cu", "two_shot.cu")


class _Group(ctypes.Structure):
    """The kernels' `Group`."""

    _fields_ = (
        ("places", ctypes.c_void_p * MOST_RANKS),
        ("epochs", ctypes.c_void_p),
        ("failed", ctypes.c_void_p),
        ("patience", ctypes.c_uint64),
        ("ranks", ctypes.c_int),
        ("rank", ctypes.c_int),
        ("words", ctypes.c_int),
        ("share", ctypes.c_int),
    )


class _SumKernels(ctypes.Structure):
    """The C library's `SumKernels`."""

    _fields_ = (
        ("kernels", ctypes.c_void_p * len(TYPES)),
        ("group", ctypes.c_void_p),
        ("most", ctypes.c_size_t),
        ("threads", ctypes.c_uint),
        ("width", ctypes.c_uint),
        ("blocks", ctypes.c_uint),
    )


class _KernelSums(ctypes.Structure):
    """The C library's `KernelSums`."""

    _fields_ = (("launch", ctypes.c_void_p), ("small", _SumKernels), ("large", _SumKernels), ("most", ctypes.c_size_t))


def small_bytes(ranks: int) -> int:
    """The bytes up to which a sum is one-shot.

    Measured on H200s (tests/gpu/sums.py), in microseconds, NCCL / one-shot: 8 KiB 6.6 / 2.6 on two and 9.7 / 4.0 on
    four, 256 KiB 8.2 / 4.4 and 11.4 / 8.6, 1 MiB 13.9 / 9.7 and 17.8 / 22.7. NCCL / two-shot, on two: 256 KiB
    8.3 / 8, 1 MiB 13.9 / 10.3, 4 MiB 32 / 20, 8 MiB 46 / 32, 16 MiB 76 / 67, 32 MiB 136 / 133.
    """
    return (1 << 20) // (ranks - 1) // (SMALL_THREADS * WIDTH) * (SMALL_THREADS * WIDTH)


class KernelSums:
    """One rank's end of a group's sums of up to MOST bytes. `pointer` is that of the C library's object.

    Raises CuPy's error if the kernels can't be compiled, or the memory is lacking.
    """

    def __init__(self, gpu: GpuDevice, ranks: int, rank: int) -> None:
        self._gpu = gpu
        small = small_bytes(ranks)
        words, share = small // WIDTH, -(-LARGE // WORD // ranks)
        # Parts and shares of two large sums; a flag for each exchange, rank and block.
        places, flags = 2 * ranks * words * PLACE, 2 * ranks * LARGE_BLOCKS * EPOCH
        # Not of a pool: another process can only open a whole allocation.
        self._memory = gpu.cuda.Memory(places + 4 * ranks * share * WORD + flags)
        blocks = words // SMALL_THREADS
        self._epochs = gpu.cuda.Memory((blocks + LARGE_BLOCKS) * EPOCH)
        for memory in (self._memory, self._epochs):
            gpu.cuda.runtime.memsetAsync(memory.ptr, 0, memory.size, gpu.stream.ptr)
        self._failed = np.frombuffer(gpu.cuda.alloc_pinned_memory(EPOCH), np.int32, 1)
        self._failed[0] = 0
        self._groups = [
            _Group(epochs=epochs, failed=self._failed.ctypes.data, ranks=ranks, rank=rank, words=words, share=share)
            for epochs in (self._epochs.ptr, self._epochs.ptr + blocks * EPOCH)
        ]
        self._set_patience(PATIENCE)
        source = "".join((NATIVE / name).read_text() for name in SOURCES)
        self._module = gpu.cupy.RawModule(code=source, options=(f"-DMOST_RANKS={MOST_RANKS}",))
        launch = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchKernel, ctypes.c_void_p)
        self._sums = _KernelSums(
            launch,
            self._kernels("one_shot", self._groups[0], small, SMALL_THREADS, WIDTH, 0),
            self._kernels("two_shot", self._groups[1], ranks * share * WORD, LARGE_THREADS, 0, LARGE_BLOCKS),
            MOST,
        )
        self.pointer = ctypes.addressof(self._sums)
        gpu.wait_all()

    def _kernels(self, kind: str, group: _Group, *numbers: int) -> _SumKernels:
        kernels = [self._module.get_function(f"{kind}_{name}").kernel.ptr for name in TYPES]
        return _SumKernels((ctypes.c_void_p * len(TYPES))(*kernels), ctypes.addressof(group), *numbers)

    def _set_patience(self, seconds: float) -> None:
        for group in self._groups:
            group.patience = int(1e9 * seconds)

    @property
    def handle(self) -> bytes:
        """The handle by which another process opens this rank's memory."""
        return bytes(self._gpu.cuda.runtime.ipcGetMemHandle(self._memory.ptr))

    def open(self, handles: Sequence[bytes]) -> None:
        """Open all ranks' memory, by their handles. Raises CuPy's error if this GPU has no access to another one's."""
        for rank, handle in enumerate(handles):
            own = rank == self._groups[0].rank
            place = self._memory.ptr if own else self._gpu.cuda.runtime.ipcOpenMemHandle(handle)
            for group in self._groups:
                group.places[rank] = place

    def close(self) -> None:
        """Close the other ranks' memory. These may only free it afterwards."""
        for rank, place in enumerate(self._groups[0].places[: self._groups[0].ranks]):
            if rank != self._groups[0].rank and place:
                self._gpu.cuda.runtime.ipcCloseMemHandle(place)

    def test(self) -> None:
        """Sum numbers with all ranks, who must call this at the same time. Raises EngineError for a wrong result."""
        self._set_patience(TEST_PATIENCE)
        ranks, rank = self._groups[0].ranks, self._groups[0].rank
        for size in (SMALL_THREADS * WIDTH, small_bytes(ranks) + LARGE_BLOCKS * LARGE_THREADS * WORD):
            numbers = np.arange(size // 2, dtype=np.int32) % 61
            part = self._gpu.upload((numbers + rank).astype(np.float16))
            whole = self._gpu.empty(part.shape, part.dtype)
            self.sum(part, whole)
            summed = self._gpu.download({"": whole})[""]
            self.check()
            if not np.array_equal(summed, ranks * numbers + sum(range(ranks))):
                raise EngineError(f"{self._gpu.name} reads wrong numbers from the other GPUs' memory")
        self._set_patience(PATIENCE)

    def sum(self, part: GpuArray, whole: GpuArray) -> None:
        """Launch a sum on the GPU's stream. Raises EngineError if CUDA can't launch it."""
        code, stream = CODES[part.dtype], self._gpu.stream.ptr
        status = load_library().splitc_kernel_sum(self.pointer, code, part.pointer, whole.pointer, part.nbytes, stream)
        if status:
            raise EngineError(f"{self._gpu.name} can't sum: CUDA error {status}")

    def check(self) -> None:
        """Raise EngineError if a rank did not join a sum in time."""
        if late := int(self._failed[0]):
            raise EngineError(f"{self._gpu.name} waited too long for rank {late - 1} of its group in an all-reduce")


def connect_kernel_sums(
    gpu: GpuDevice, group: Sequence[int], rank: int, all_gather: Callable[[Sequence[int], Any], Any]
) -> KernelSums | None:
    """A rank's end, if all ranks can write to each other's memory. All ranks must call this at the same time.

    Otherwise returns None, and `gpu` gets a note with the reason. `all_gather` is the method of the rank's collectives.
    """
    if not 1 < len(group) <= MOST_RANKS or os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
        return None
    made: Any = attempt(lambda: KernelSums(gpu, len(group), list(group).index(rank)))

    def agree(do: Callable[[Any], Any], known: Any) -> Any:
        """The results of `do` on all ranks, or the Failure of one of them: then no rank goes on."""
        return all_gather(group, known if isinstance(known, Failure) else attempt(lambda: do(known)))

    handles = agree(lambda sums: sums.handle, made)
    opened = agree(lambda all_handles: made.open(all_handles), handles)
    tested = agree(lambda _: made.test(), opened)
    if isinstance(tested, Failure):
        # All close before one frees its memory.
        all_gather(group, None if isinstance(made, Failure) else attempt(made.close))
        gpu.notes.append(f"all-reduces use NCCL only, which is slower for small ones: {tested.error}")
        return None
    return made  # type: ignore[no-any-return]
