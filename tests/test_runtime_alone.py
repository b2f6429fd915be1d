"""A machine that only runs packages has none of the libraries that compile them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from splitc.compiler.cli import LIBRARIES
from splitc.compiler.planning.request import ROW_MIN
from tests.conftest import assert_close, decoder_feeds, run_whole

STARTS = {"script": [str(Path(sys.executable).with_name("splitc"))], "module": [sys.executable, "-m", "splitc.runtime"]}


@pytest.fixture(params=STARTS)
def start(request: pytest.FixtureRequest) -> list[str]:
    """How the command is started."""
    return STARTS[request.param]


@pytest.fixture
def alone(tmp_path: Path) -> dict[str, str]:
    """The environment of a process, and of those that it starts, to which the compiler's libraries are not there."""
    blocked = f"import sys\nsys.modules.update(dict.fromkeys({LIBRARIES!r}))\n"
    (tmp_path / "sitecustomize.py").write_text(blocked)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def splitc(start: list[str], alone: dict[str, str], *arguments: object, code: int = 0) -> str:
    """What the command prints where it ends well, and its message where it does not."""
    command = [*start, *map(str, arguments)]
    result = subprocess.run(command, env=alone, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in result.stderr
    assert result.returncode == code, result.stderr
    return " ".join((result.stderr if code else result.stdout).split())


def test_packages_are_run(
    start: list[str], alone: dict[str, str], decoder: Path, package: Path, tmp_path: Path
) -> None:
    feeds = decoder_feeds()
    np.savez(tmp_path / "in.npz", **feeds)
    splitc(start, alone, "run", package, "--inputs", tmp_path / "in.npz", "--outputs", tmp_path / "out.npz")
    assert_close(dict(np.load(tmp_path / "out.npz")), run_whole(decoder, feeds))
    assert "9 of 9 outputs agree" in splitc(start, alone, "check", package, "--model", decoder)
    assert "package" in splitc(start, alone, "bench", package, "--runs", 2)
    assert len(splitc(start, alone, "generate", package, "--prompt-ids", "1,2", "-n", 3).split()) == 3
    assert "3 ranks" in splitc(start, alone, "inspect", package)
    assert json.loads(splitc(start, alone, "devices", "--json"))[0]["name"].startswith("cpu0")
    assert "generate" in splitc(start, alone, "--help")


@pytest.mark.parametrize(
    "arguments", [["plan", "M", "-d", "cpu0"], ["compile", "M", "-d", "cpu0", "-o", "P"], ["build", "P"]]
)
def test_what_compiling_needs_is_named(start: list[str], alone: dict[str, str], arguments: list[str]) -> None:
    message = splitc(start, alone, *arguments, code=2)
    assert "pip install onnx onnx-ir onnx-shape-inference sympy" in message
    assert splitc(start, alone, arguments[0], "--help").startswith("Usage: ")


def test_help_loads_nothing_that_compiles() -> None:
    """It would take the better part of a second."""
    program = (
        "import sys\nfrom splitc.runtime.__main__ import main\nsys.argv = ['splitc', 'compile', '--help']\n"
        f"try: main()\nfinally: print('loaded', [name for name in {LIBRARIES!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.endswith("loaded []\n")
    assert f"[default: {ROW_MIN}]" in " ".join(result.stdout.replace("│", " ").split())


def test_compiler_is_imported_as_it_always_was() -> None:
    program = "from splitc.compiler import *\nprint(all(map(callable, (Plan, Request, compile_model, plan_model))))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == "True\n"
