"""The process of ranks on simulated GPUs."""

from __future__ import annotations

from splitc.runtime.processes import rank
from tests.helpers import fake_nccl
from tests.helpers.fake_gpus import for_good, install_cupy, make_backend


def main(descriptor: int) -> None:
    """As `splitc.runtime.processes.rank.main`."""
    install_cupy(for_good)
    for_good("splitc.runtime.ranks.loaded.make_backend", make_backend)
    for_good("splitc.runtime.collectives.nccl.find_nccl", lambda: fake_nccl)
    rank.main(descriptor)
