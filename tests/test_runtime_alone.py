"""A machine that only runs packages does not need the libraries that compile them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splitc import compiler
from splitc.compiler.cli.commands import LIBRARIES
from splitc.compiler.request.request import ROW_MIN
from splitc.runtime.arrays.files import save_arrays
from tests.conftest import assert_close, decoder_feeds, run_whole
from tests.helpers.command import SCRIPT, splitc_process, splitc_several
from tests.helpers.packages import compile_mode

MODULE = [sys.executable, "-m", "splitc.runtime"]


@pytest.fixture
def alone(tmp_path: Path) -> dict[str, str]:
    """The environment of a process and its children in which the compiler's libraries can't be imported."""
    blocked = f"import sys\nsys.modules.update(dict.fromkeys({LIBRARIES!r}))\n"
    (tmp_path / "sitecustomize.py").write_text(blocked)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def test_package_is_run_as_by_a_module(alone: dict[str, str], decoder: Path, package: Path, tmp_path: Path) -> None:
    feeds = decoder_feeds()
    save_arrays(tmp_path / "in.npz", feeds)
    files = ("--inputs", tmp_path / "in.npz", "--outputs", tmp_path / "out.npz")
    splitc_process("run", package, *files, start=MODULE, env=alone)
    assert_close(dict(np.load(tmp_path / "out.npz")), run_whole(decoder, feeds))


def test_every_command_of_the_runtime_runs(alone: dict[str, str], decoder: Path, package: Path, tmp_path: Path) -> None:
    commands: list[list[object]] = [
        ["check", compile_mode(decoder, "one device"), "--model", decoder],
        ["bench", package, "--runs", 2, "--no-memory"],
        ["generate", package, "--prompt-ids", "1,2", "-n", 3],
        ["inspect", package, "--report", tmp_path / "page.html"],
        ["export", "triton", package, "-o", tmp_path / "triton"],
        ["export", "mlserver", package, "-o", tmp_path / "mlserver"],
        ["devices", "--json"],
        ["--help"],
    ]
    found = splitc_several(commands, alone)
    assert [(each.returncode, "Traceback" in each.stderr) for each in found] == [(0, False)] * len(commands)
    checked, timed, generated, inspected, *exported, devices, usage = (" ".join(each.stdout.split()) for each in found)
    assert "5 of 5 outputs agree" in checked
    assert "package" in timed
    assert len(generated.split()) == 3
    assert "3 ranks" in inspected
    assert all(text.startswith("wrote ") for text in exported)
    assert json.loads(devices)[0]["name"].startswith("cpu0")
    assert "generate" in usage


def test_what_compiling_needs_is_named(alone: dict[str, str], package: Path) -> None:
    commands = [
        ["plan", __file__, "-d", "cpu0"],
        ["compile", __file__, "-d", "cpu0", "-o", "P"],
        ["build", str(package)],
    ]
    found = splitc_several([*commands, *([command[0], "--help"] for command in commands)], alone)
    for refused, usage in zip(found[:3], found[3:]):
        assert refused.returncode == 2
        assert "pip install onnx onnx-ir onnx-shape-inference sympy" in " ".join(refused.stderr.split())
        assert usage.returncode == 0
        assert " ".join(usage.stdout.split()).startswith("Usage: ")


@pytest.mark.parametrize("start", [[SCRIPT], MODULE], ids=["script", "module"])
def test_what_compiling_needs_ends_the_process(start: list[str], alone: dict[str, str]) -> None:
    splitc_process("plan", "M", "-d", "cpu0", start=start, env=alone, code=2)


def test_help_loads_nothing_that_compiles() -> None:
    """Loading them would take most of a second."""
    program = (
        "import sys\nfrom splitc.runtime.__main__ import main\nsys.argv = ['splitc', 'compile', '--help']\n"
        f"try: main()\nfinally: print('loaded', [name for name in {LIBRARIES!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.endswith("loaded []\n")
    assert f"[default: {ROW_MIN}]" in " ".join(result.stdout.replace("│", " ").split())


def test_compiler_is_imported_as_it_always_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """All names at once, none of which has been asked for."""
    for name in compiler.__all__:
        monkeypatch.delitem(vars(compiler), name, raising=False)
    names: dict[str, Any] = {}
    exec("from splitc.compiler import *", names)
    assert all(callable(names[name]) for name in ("Plan", "Request", "compile_model", "plan_model"))
