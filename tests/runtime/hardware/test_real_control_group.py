"""A real control group with a limit of memory: plans and runs in it obey the limit. Skipped where none can be made."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.packages import compile_mode

ROOT = Path("/sys/fs/cgroup")
LIMIT = 384 << 20  # of which Python and its libraries take some 200
PROGRAM = """
import os, sys
from pathlib import Path
group, model, package = map(Path, sys.argv[1:])
(group / "cgroup.procs").write_text(str(os.getpid()))
import numpy as np
from splitc.compiler import Request, plan_model
from splitc.runtime import Session
from splitc.runtime.errors import EngineError
from splitc.runtime.hardware.control_groups import memory_limit
from tests.helpers.feeds import decoder_feeds

limit, free = memory_limit()
assert limit == {limit} and free < limit, (limit, free)
budgets = [rank.budget for rank in plan_model(model, "2xcpu", Request(split_mode="layer", headroom=16 << 20)).ranks]
assert sum(budgets) <= free, (budgets, free)
small, large = decoder_feeds(batch=1, new=2, past=4), decoder_feeds(batch=256, new=256, past=0)
with Session(package) as session:
    expected = session.run(small)
    try:
        session.run(large)
    except EngineError as error:
        print(error)
    for name, value in session.run(small).items():
        np.testing.assert_array_equal(value, expected[name])
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of this limit, of either version."""
    parent = ROOT if (ROOT / "cgroup.controllers").exists() else ROOT / "memory"
    folder = parent / f"splitc-test-{os.getpid()}"
    try:
        folder.mkdir()
        file = next(path for name in ("memory.max", "memory.limit_in_bytes") if (path := folder / name).exists())
        file.write_text(str(LIMIT))
    except (OSError, StopIteration) as error:
        with suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no control group with a limit of memory can be made in {parent}: {error or 'no such controller'}")
    yield folder
    folder.rmdir()


def test_plan_and_run_obey_a_real_control_group(group: Path, decoder: Path) -> None:
    """Without a budget of its own a request that needs more than the group leaves fails alone, and no process ends."""
    package = compile_mode(decoder, "layer")
    command = [sys.executable, "-c", PROGRAM.format(limit=LIMIT), str(group), str(decoder), str(package)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "more memory than the budget leaves" in done.stdout
