"""NCCL's files that a process has mapped."""

from __future__ import annotations

import mmap
import os
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from splitc.runtime.ipc.mapped_files import NCCL, find_mapped


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc")
def test_other_files_in_memory_have_names_of_any_bytes(tmp_path: Path) -> None:
    """Weights may lie in a folder with such a name: a rank must not fail because of it after loading."""
    other = tmp_path / os.fsdecode(b"\xff")
    ours = Path(f"/dev/shm/nccl-test-{os.getpid()}")
    try:
        for path in (other, ours):
            path.write_bytes(bytes(mmap.PAGESIZE))
        with ExitStack() as stack:
            for path in (other, ours):
                file = stack.enter_context(path.open("r+b"))
                stack.enter_context(mmap.mmap(file.fileno(), 0))
            assert find_mapped(os.getpid(), NCCL) == {str(ours)}
    finally:
        ours.unlink(missing_ok=True)
