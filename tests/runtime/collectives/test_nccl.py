"""NCCL's connections, and thus its memory, for ranks that sum and for ranks that only send."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from splitc.runtime.collectives.nccl import NcclCommunicators


@pytest.mark.parametrize("sums", [False, True])
def test_only_ranks_that_sum_connect_for_sums(sums: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_RUNTIME_CONNECT", "")
    monkeypatch.delenv("NCCL_RUNTIME_CONNECT")
    nccl = SimpleNamespace(get_unique_id=lambda: "id", NcclCommunicator=lambda *_: SimpleNamespace(abort=lambda: None))
    monkeypatch.setattr("splitc.runtime.collectives.nccl.find_nccl", lambda: nccl)
    communicators = NcclCommunicators(0, lambda group, value: [value] * len(group))
    communicators.create([0, 1], sums)
    communicators.close()
    assert os.environ.get("NCCL_RUNTIME_CONNECT") == ("0" if sums else None)
