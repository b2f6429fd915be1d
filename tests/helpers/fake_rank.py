"""A rank's process on a GPU that is not there."""

from __future__ import annotations

import pytest

from splitc.runtime.processes import rank
from tests.helpers import fake_nccl
from tests.helpers.fake_gpus import install_cupy, make_backend


def main(descriptor: int) -> None:
    """As `splitc.runtime.processes.rank.main`."""
    with pytest.MonkeyPatch.context() as patch:
        install_cupy(patch)
        patch.setattr("splitc.runtime.processes.rank.make_backend", make_backend)
        patch.setattr("splitc.runtime.collectives.nccl.find_nccl", lambda: fake_nccl)
        rank.main(descriptor)
