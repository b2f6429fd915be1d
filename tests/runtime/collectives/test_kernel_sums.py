"""How ranks agree on sums by kernels. The sums themselves need GPUs: see tests/gpu."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest

from splitc.runtime.collectives import kernel_sums
from splitc.runtime.errors import EngineError
from splitc.runtime.threads.failures import Failure


@pytest.mark.parametrize("fails", ["open", "test"])
def test_no_memory_is_freed_that_another_rank_has_open(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, int]] = []
    together, said = Barrier(2, timeout=20), [None, None]

    class Sums:
        handle = b""

        def __init__(self, gpu: Any, ranks: int, rank: int) -> None:
            self.rank = rank

        def open(self, handles: Sequence[bytes]) -> None:
            self._may_fail("open")

        def test(self) -> None:
            self._may_fail("test")

        def _may_fail(self, what: str) -> None:
            if what == fails and self.rank == 1:
                raise EngineError("wrong numbers")

        def close(self) -> None:
            events.append(("closed", self.rank))

        def __del__(self) -> None:
            events.append(("freed", self.rank))

    def connect(rank: int) -> tuple[Any, list[str]]:
        def all_gather(group: Sequence[int], value: Any) -> Any:
            said[rank] = value
            together.wait()
            known = list(said)
            together.wait()
            return next((one for one in known if isinstance(one, Failure)), known)

        gpu: Any = SimpleNamespace(notes=[])
        return kernel_sums.connect_kernel_sums(gpu, [0, 1], rank, all_gather), gpu.notes

    monkeypatch.setattr(kernel_sums, "KernelSums", Sums)
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(connect, range(2)))
    assert ends == [(None, ["all-reduces use NCCL only, which is slower for small ones: wrong numbers"])] * 2
    assert sorted(events[:2]) == [("closed", 0), ("closed", 1)]
