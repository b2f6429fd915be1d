"""Which kernels attention uses."""

from __future__ import annotations

import os

import pytest

from splitc.runtime.engines import attention_kernels
from splitc.runtime.engines.attention_kernels import CUDNN, XQA, attention_of


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process, whose user has chosen nothing."""
    monkeypatch.setattr(attention_kernels, "_gpus", [])
    for name in (CUDNN, XQA):
        monkeypatch.delenv(name, raising=False)


def test_one_gpu_of_a_process_has_xqa() -> None:
    """And no other, whatever its number. Elsewhere ONNX Runtime chooses, which may take cuDNN then."""
    for gpu, has_xqa in ((1, True), (0, False), (1, True)):
        with attention_of(gpu) as options:
            assert os.environ[XQA] == str(int(has_xqa))
            assert ("sdpa_kernel" in options) == has_xqa
            assert not int(options.get("sdpa_kernel", 0)) & 8
        assert XQA not in os.environ


@pytest.mark.parametrize("name", [CUDNN, XQA])
def test_what_the_user_chose_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "0")
    with attention_of(0) as options:
        assert options == {}
    assert os.environ[name] == "0"


def test_a_session_that_can_not_be_made_leaves_nothing() -> None:
    with pytest.raises(ValueError, match="no"), attention_of(0):
        raise ValueError("no")
    assert XQA not in os.environ
