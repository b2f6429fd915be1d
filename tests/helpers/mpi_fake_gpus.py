"""Sessions one after the other on GPUs that are not there, in processes that MPI has started.

mpirun -n 2 python -m tests.helpers.mpi_fake_gpus PACKAGE OUTPUTS
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from splitc.runtime import Session
from splitc.runtime.gpus import GpuIdentity
from tests.conftest import decoder_feeds
from tests.helpers import fake_nccl
from tests.helpers.fake_gpus import install_cupy, make_backend

SESSIONS, RUNS = 3, 6


def main(package: str, written: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        install_cupy(patch)
        patch.setattr("splitc.runtime.mpi.mpi_rank.make_backend", make_backend)
        patch.setattr("splitc.runtime.mpi.mpi_rank.identify_gpu", lambda gpu: GpuIdentity(str(gpu), "fake", 1 << 40))
        patch.setattr("splitc.runtime.collectives.nccl.find_nccl", lambda: fake_nccl)
        for number in range(SESSIONS):
            with Session(package, devices=["2xcuda"]) as session:
                for _ in range(RUNS):
                    outputs: dict[str, Any] = session.run(decoder_feeds())
            print(f"session {number} ended with {len(fake_nccl.connected)} communicators", flush=True)
        np.savez(written, **outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
