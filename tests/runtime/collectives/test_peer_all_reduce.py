"""All-reduce over GPUs that read each other's memory."""

from __future__ import annotations

from splitc.runtime.collectives.peer_all_reduce import slices
from splitc.runtime.engines.gpu_array import GpuArray


def test_slices_are_all_of_an_array() -> None:
    for size, count in ((1, 3), (1000, 3), (1024, 4), (7, 4)):
        found = slices(GpuArray(1 << 20, (size,), "float16", None), count)
        assert sum(each.shape[0] for each in found) == size
        assert [each.pointer for each in found] == [
            (1 << 20) + 2 * sum(before.shape[0] for before in found[:number]) for number in range(count)
        ]
