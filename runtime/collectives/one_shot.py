"""Small sums over GPUs of one machine by a kernel of our own, where each GPU can write to the others' memory.

Each GPU writes its part to all others, then adds up what has arrived: one exchange, where NCCL's ring takes several.
As in NCCL's LL protocol, each four bytes of data go with four bytes of a flag, so a reader that sees the flag has the
data, without a fence. The flag is the number of the sum: it tells new data from old.

A rank writes to two places in turn. It can't be two sums ahead: to end a sum it needs the data of all others, which
they send when they have ended the one before.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from splitc.runtime.engines.gpu_array import GpuArray
from splitc.runtime.engines.gpu_device import GpuDevice
from splitc.runtime.engines.operator_library import load_library
from splitc.runtime.errors import EngineError
from splitc.runtime.failures import Failure, attempt

# The most ranks.
MOST_RANKS = 8
# Threads of a block, and the bytes that each one sums. A block has its own places and numbers of sums.
THREADS, WIDTH = 128, 8
# Seconds that a GPU waits for the others in a sum, and in the first one, which is a test.
PATIENCE, TEST_PATIENCE = 120.0, 10.0
# Bytes of a place: a thread's data and flags. Bytes of the number of a sum.
PLACE, TURN = 16, 4
# The kernels, in the order that the C library has them, and ONNX's codes of their number types.
KERNELS = ("sum_float", "sum_half", "sum_bfloat16")
CODES = {"float32": 1, "float16": 10, "bfloat16": 16}
SOURCE = Path(__file__).parent / "native" / "one_shot.cu"


class _Group(ctypes.Structure):
    """The kernel's `Group`."""

    _fields_ = (
        ("places", ctypes.c_void_p * MOST_RANKS),
        ("turns", ctypes.c_void_p),
        ("failed", ctypes.c_void_p),
        ("patience", ctypes.c_uint64),
        ("ranks", ctypes.c_int),
        ("rank", ctypes.c_int),
        ("words", ctypes.c_int),
    )


def most_bytes(ranks: int) -> int:
    """The bytes up to which a sum is faster than NCCL's: each rank sends its part to all others.

    Measured on H200s (tests/gpu/sums.py), in microseconds, NCCL / kernel: 8 KiB 6.6 / 2.6 on two and 9.7 / 4.0 on four,
    256 KiB 8.2 / 4.7 and 11.4 / 8.6, 1 MiB 13.7 / 9.8 and 17.8 / 22.7.
    """
    return (1 << 20) // (ranks - 1) // (THREADS * WIDTH) * (THREADS * WIDTH)


class OneShotSums:
    """One rank's end of a group's sums of up to `most` bytes. `pointer` is that of the C library's object.

    Raises CuPy's error if the kernels can't be compiled, or the memory is lacking.
    """

    def __init__(self, gpu: GpuDevice, ranks: int, rank: int, most: int) -> None:
        self._gpu = gpu
        words = most // WIDTH
        # Not of a pool: another process can only open a whole allocation.
        self._memory = gpu.cuda.Memory(2 * ranks * words * PLACE)
        self._turns = gpu.cuda.Memory(words // THREADS * TURN)
        for memory in (self._memory, self._turns):
            gpu.cuda.runtime.memsetAsync(memory.ptr, 0, memory.size, gpu.stream.ptr)
        self._failed = np.frombuffer(gpu.cuda.alloc_pinned_memory(TURN), np.int32, 1)
        self._failed[0] = 0
        self._group = _Group(
            turns=self._turns.ptr, failed=self._failed.ctypes.data, ranks=ranks, rank=rank, words=words
        )
        module = gpu.cupy.RawModule(code=SOURCE.read_text(), options=(f"-DMOST_RANKS={MOST_RANKS}",))
        self._kernels = [module.get_function(name).kernel for name in KERNELS]
        launch = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchKernel, ctypes.c_void_p)
        kernels = (ctypes.c_void_p * len(KERNELS))(*(kernel.ptr for kernel in self._kernels))
        group = ctypes.addressof(self._group)
        self.pointer = load_library().splitc_one_shot(launch, kernels, group, most)
        gpu.wait_all()

    @property
    def handle(self) -> bytes:
        """What another process opens this rank's memory by."""
        return bytes(self._gpu.cuda.runtime.ipcGetMemHandle(self._memory.ptr))

    def open(self, handles: Sequence[bytes]) -> None:
        """Open all ranks' memory, by their handles. Raises CuPy's error if this GPU has no access to another one's."""
        for rank, handle in enumerate(handles):
            own = rank == self._group.rank
            self._group.places[rank] = self._memory.ptr if own else self._gpu.cuda.runtime.ipcOpenMemHandle(handle)

    def test(self) -> None:
        """Sum numbers with all ranks, who must call this at the same time. Raises EngineError for a wrong result."""
        self._group.patience = int(1e9 * TEST_PATIENCE)
        numbers = np.arange(THREADS * WIDTH, dtype=np.float16) % 61
        ranks = self._group.ranks
        part = self._gpu.upload(numbers + np.float16(self._group.rank))
        whole = self._gpu.empty(part.shape, part.dtype)
        self.sum(part, whole)
        found = self._gpu.download({"": whole})[""]
        self.check()
        if not np.array_equal(found, ranks * numbers + np.float16(sum(range(ranks)))):
            raise EngineError(f"{self._gpu.name} gets wrong numbers from the other GPUs' memory")
        self._group.patience = int(1e9 * PATIENCE)

    def sum(self, part: GpuArray, whole: GpuArray) -> None:
        """Put a sum on the GPU's stream. Raises EngineError if CUDA can't launch it."""
        code, stream = CODES[part.dtype], self._gpu.stream.ptr
        status = load_library().splitc_one_shot_sum(
            self.pointer, code, part.pointer, whole.pointer, part.nbytes, stream
        )
        if status:
            raise EngineError(f"{self._gpu.name} can't sum: CUDA error {status}")

    def check(self) -> None:
        """Raise EngineError if a rank did not come to a sum in time."""
        if late := int(self._failed[0]):
            raise EngineError(f"{self._gpu.name} waited too long for rank {late - 1} of its group in a sum")


def connect_one_shot(
    gpu: GpuDevice, group: Sequence[int], rank: int, all_gather: Callable[[Sequence[int], Any], Any]
) -> OneShotSums | None:
    """The end of a rank, if all ranks can write to each other's memory. All ranks must call this at the same time.

    Otherwise `gpu` gets a note of the reason. `all_gather` is the method of the rank's collectives.
    """
    if not 1 < len(group) <= MOST_RANKS or os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
        return None
    made: Any = attempt(lambda: OneShotSums(gpu, len(group), list(group).index(rank), most_bytes(len(group))))

    def agree(do: Callable[[Any], Any], known: Any) -> Any:
        """What `do` gives on all ranks, or the Failure of one of them: then none goes on."""
        return all_gather(group, known if isinstance(known, Failure) else attempt(lambda: do(known)))

    handles = agree(lambda sums: sums.handle, made)
    opened = agree(lambda all_handles: made.open(all_handles), handles)
    tested = agree(lambda _: made.test(), opened)
    if isinstance(tested, Failure):
        gpu.notes.append(f"NCCL does all sums over GPUs, small ones too, which is slower: {tested.error}")
        return None
    return made  # type: ignore[no-any-return]
