from __future__ import annotations

import gc

import pytest

from splitc.runtime.threads.garbage import GARBAGE_AFTER, rare_garbage


@pytest.mark.parametrize(("before", "inside"), [(700, GARBAGE_AFTER), (10**6, 10**6), (0, 0)])
def test_garbage_is_looked_for_as_before_when_all_callers_have_left(before: int, inside: int) -> None:
    own = gc.get_threshold()
    gc.set_threshold(before, 7, 3)
    try:
        one, other = rare_garbage(), rare_garbage()
        one.__enter__()
        other.__enter__()
        assert gc.get_threshold() == (inside, 7, 3)
        one.__exit__(None, None, None)
        assert gc.get_threshold() == (inside, 7, 3)
        other.__exit__(None, None, None)
        assert gc.get_threshold() == (before, 7, 3)
    finally:
        gc.set_threshold(*own)
