"""Sessions one after the other on simulated GPUs, in processes that MPI has started.

mpirun -n 2 python -m tests.helpers.mpi_fake_gpus FOLDER PACKAGE...: the outputs are FOLDER/NAME.npz, by its name.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from splitc.runtime import Session
from splitc.runtime.hardware.gpus import GpuIdentity
from tests.helpers import fake_nccl
from tests.helpers.fake_gpus import for_good, install_cupy, make_backend
from tests.helpers.feeds import decoder_feeds

SESSIONS, RUNS = 2, 6
# A prefix as in NCCL's names of shared memory files, for this job.
NAME = f"nccl-test-{os.getppid()}"


@contextmanager
def shared() -> Iterator[Path]:
    """A file like NCCL's, mapped by this process."""
    path = Path(f"/dev/shm/{NAME}-{os.getpid()}")
    path.write_bytes(bytes(mmap.PAGESIZE))
    try:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
            yield path
    finally:
        path.unlink(missing_ok=True)


def main(folder: str, *packages: str) -> None:
    install_cupy(for_good)
    for_good("splitc.runtime.ranks.loaded.make_backend", make_backend)
    for_good("splitc.runtime.mpi.rank.identify_gpu", lambda gpu: GpuIdentity(str(gpu), "fake", 1 << 40))
    for_good("splitc.runtime.collectives.nccl.find_nccl", lambda: fake_nccl)
    with shared() as file:
        for package, number in product(packages, range(SESSIONS)):
            with Session(package, devices=["2xcuda"]) as session:
                for _ in range(RUNS):
                    outputs: dict[str, Any] = session.run(decoder_feeds())
                left = [path.name for path in file.parent.glob(f"{NAME}-*")]
            print(f"session {number} ended with {len(fake_nccl.connected)} communicators and files {left}", flush=True)
            np.savez(f"{folder}/{Path(package).name}.npz", **outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
