"""The choice of attention kernels."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor, TimeoutError

import pytest

from splitc.runtime.engines import variables
from splitc.runtime.engines.variables import CUDNN, XQA, attention_for
from tests.helpers.variables import read_variable


@pytest.fixture(autouse=True)
def user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without sessions, and without the user's choice of kernels."""
    monkeypatch.setattr(variables, "_with_xqa", [])
    monkeypatch.setattr(variables, "_for_good", threading.Event())
    for name in (CUDNN, XQA):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("known_shapes", [False, True])
def test_what_has_to_plan_is_for_known_shapes(known_shapes: bool) -> None:
    with attention_for(known_shapes, 0) as options:
        assert read_variable(XQA) == "1"
        assert bool(int(options["sdpa_kernel"]) & 8) == known_shapes
    assert read_variable(XQA) is None


@pytest.mark.parametrize("known_shapes", [False, True])
def test_the_memory_efficient_kernel_takes_no_rows_of_any_length(known_shapes: bool) -> None:
    with attention_for(known_shapes, 0, unaligned_bias=True) as options:
        assert int(options["sdpa_kernel"]) & 2 == 0
    with attention_for(known_shapes, 0) as options:
        assert int(options["sdpa_kernel"]) & 2


def test_kernels_that_work_on_one_gpu_of_a_process_are_on_its_first() -> None:
    made = []
    for gpu in (1, 0, 1):
        with attention_for(True, gpu):
            made.append(read_variable(XQA))
    assert made == ["1", "0", "1"]


def test_others_do_not_take_it_for_the_users_choice() -> None:
    """Sessions of other threads have cuDNN's kernels too, and so do processes started meanwhile."""

    def choose() -> bool:
        with attention_for(True, 0) as options:
            return bool(options)

    with ThreadPoolExecutor(1) as pool:
        with attention_for(True, 0):
            assert XQA not in {**os.environ}
            other = pool.submit(choose)
            with pytest.raises(TimeoutError):
                other.result(0.2)
        assert other.result(10)


@pytest.mark.parametrize("name", [CUDNN, XQA])
def test_what_the_user_chose_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "0")
    with attention_for(True, 0) as options:
        assert options == {}
    assert os.environ[name] == "0"


def test_a_session_that_can_not_be_made_leaves_nothing() -> None:
    with pytest.raises(ValueError, match="no"), attention_for(False, 0):
        raise ValueError("no")
    assert read_variable(XQA) is None
