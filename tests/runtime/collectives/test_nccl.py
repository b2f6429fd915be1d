"""NCCL's connections, and thus its memory, for ranks that sum and for ranks that only send."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from splitc.runtime.collectives.nccl import NcclCommunicators
from splitc.runtime.engines import variables
from splitc.runtime.engines.variables import attention_for, set_workspace


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


def test_no_variable_is_set_while_nccl_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process in a hundred crashed: NCCL reads variables on its thread, and setting one moves them."""
    monkeypatch.setattr(variables, "_with_xqa", [])
    monkeypatch.setattr(variables, "_for_good", threading.Event())
    for name in ("NCCL_RUNTIME_CONNECT", "NCCL_MAX_P2P_NCHANNELS", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    connecting, loaded = threading.Event(), threading.Event()

    def get_unique_id() -> str:
        connecting.set()
        assert loaded.wait(10)
        return "id"

    nccl = SimpleNamespace(get_unique_id=get_unique_id, NcclCommunicator=lambda *_: SimpleNamespace(abort=str))
    monkeypatch.setattr("splitc.runtime.collectives.nccl.find_nccl", lambda: nccl)
    communicators = NcclCommunicators(0, lambda group, value: [value] * len(group))
    gpu: Any = SimpleNamespace(index=0, attach=lambda: None)
    communicators.create_later([0, 1], gpu, one_machine=False)
    assert connecting.wait(10)
    changed: list[Any] = []
    monkeypatch.setattr(os, "putenv", lambda *variable: changed.append(variable))
    monkeypatch.setattr(os, "unsetenv", changed.append)
    set_workspace()
    for known_shapes in (False, True):
        with attention_for(known_shapes, 0) as options:
            assert options
    assert not changed
    loaded.set()
    communicators.close()
    monkeypatch.undo()
    os.unsetenv(variables.XQA)
