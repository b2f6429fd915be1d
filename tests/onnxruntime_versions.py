"""Tests whether splitc's operators work in other versions of ONNX Runtime than the installed one.

    python -m tests.onnxruntime_versions 1.19.2 1.22.1

Each version is installed into a folder of its own, which comes first in the search path.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

TESTS = (
    "tests/runtime/collectives/test_meeting.py::test_engines_have_the_operator_inside",
    "tests/runtime/collectives/test_transfers.py::test_engines_send_and_receive",
)


def main() -> None:
    failed = [version for version in sys.argv[1:] if not _works(version)]
    sys.exit(f"the operators do not work in {', '.join(failed)}" if failed else 0)


def _works(version: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        install = ["install", "--quiet", "--no-deps", "--target", folder, f"onnxruntime=={version}"]
        subprocess.run([sys.executable, "-m", "pip", *install], check=True)
        environment = {**os.environ, "PYTHONPATH": folder}
        shown = subprocess.run(
            [sys.executable, "-c", "import onnxruntime; print(onnxruntime.__version__)"],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        assert shown.stdout.strip() == version
        found = subprocess.run(
            [sys.executable, "-m", "pytest", *TESTS], env=environment, capture_output=True, text=True
        )
        print(version, "works" if found.returncode == 0 else found.stdout[-2000:], flush=True)
        return found.returncode == 0


if __name__ == "__main__":
    main()
