"""The thread that receives messages of ranks' processes."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from splitc.runtime.processes.reader import Reader, _Watch
from tests.conftest import until


def test_who_watches_is_started_again_where_there_were_too_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise ranks that died would go unnoticed in all sessions of the program."""

    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    class Glances:
        ended = False

        def glance(self) -> None:
            self.ended = True

    watch, first, second = _Watch(), Glances(), Glances()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        with pytest.raises(RuntimeError, match="can't start"):
            watch.add(cast("Reader", first))
    watch.add(cast("Reader", second))
    until(lambda: second.ended)
    watched: list[Any] = watch._readers
    assert first not in watched
