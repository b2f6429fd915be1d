"""The measured memory of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from splitc.runtime import Session
from splitc.runtime.cli.run_options import measure_ranks
from splitc.runtime.hardware.memory_use import RankMemory


def measured(package: Path, feeds: Mapping[str, Any], adapters: Sequence[tuple[str, float]] = ()) -> list[RankMemory]:
    """The memory of ranks on CPU devices that were loaded as threads, as `splitc check` measures it."""
    load = partial(Session, package, threads=1, adapters=adapters)
    with load() as session:
        assert session.device_memory() == []
        return measure_ranks(load, session, dict(feeds))
