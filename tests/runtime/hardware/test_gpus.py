"""CuPy on a machine without a GPU, and perhaps without a home folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# What CuPy does with its cache: the newer versions as they are imported, the older ones as they compile.
CUPY = """
import os
folder = os.environ.get("CUPY_CACHE_DIR", os.path.expanduser("~/.cupy/kernel_cache"))
os.path.isdir(folder) or os.makedirs(folder)
"""
PROGRAM = """
import os
from splitc.runtime.hardware.gpus import find_cupy
assert find_cupy()
print(os.environ.get("CUPY_CACHE_IN_MEMORY"), os.environ.get("CUPY_CACHE_DIR"))
"""


@pytest.mark.parametrize(
    ("home", "shown"), [("home", "None None\n"), ("a file", "1 /\n"), ("a file/in it", "1 /\n"), (None, "1 /\n")]
)
def test_cupy_needs_no_home(tmp_path: Path, home: str | None, shown: str) -> None:
    (tmp_path / "cupy.py").write_text(CUPY)
    (tmp_path / "a file").touch()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path / (home or "a file"))}
    program = PROGRAM if home else f"import os.path; os.path.expanduser = lambda path: path\n{PROGRAM}"
    command, found = [sys.executable, "-c", program], tmp_path / "here"
    found.mkdir()
    done = subprocess.run(command, env=environment, cwd=found, capture_output=True, text=True)
    assert (done.stdout, done.stderr, list(found.iterdir())) == (shown, "", [])
