"""What the system does to a command: closed or full streams, interrupts, unreadable files."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from splitc.runtime.arrays.files import save_arrays
from splitc.runtime.engines.onnxruntime_cpu import ERRORS
from splitc.runtime.errors import MisuseError
from splitc.runtime.files.explained import explained
from tests.conftest import decoder_feeds, listen_to_interrupts
from tests.helpers.command import SCRIPT, results, several, splitc, splitc_process
from tests.helpers.fuzz import MORE
from tests.helpers.packages import compile_mode
from tests.helpers.small_disk import is_possible, on_small_disk


def shell(command: str, code: int, encoding: str = "utf-8", **more: str) -> str:
    """The output of a command, which must end with `code`."""
    environment = {**os.environ, **more}
    found = subprocess.run(
        command, shell=True, capture_output=True, timeout=120, env=environment, executable="/bin/bash"
    )
    errors = found.stderr.decode(encoding)
    assert "Traceback" not in errors
    assert found.returncode == code, errors
    return errors + found.stdout.decode(encoding)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_output_that_can_not_be_written(package: Path) -> None:
    assert "No space left on device" in shell(f"{SCRIPT} inspect {package} > /dev/full", 1)
    shell(f"{SCRIPT} inspect {package} >&-", 0)


@pytest.mark.fuzz
def test_compile_to_a_disk_that_gets_full(decoder: Path, tmp_path: Path) -> None:
    """Wherever the disk gets full: nothing is left behind, and there is one message."""
    if not is_possible():
        pytest.skip("no file systems of one's own here")
    sizes = map(int, np.random.default_rng(5).integers(8, 1300, 2 * (MORE - 1)))
    for size, mode in zip((8, 780, *sizes), cycle(("layer", "tensor"))):
        compile_ = [SCRIPT, "compile", decoder, "-d", "2xcpu", "--split-mode", mode, "--memory", "1GiB", "-o", "p"]
        code, errors, there = on_small_disk(tmp_path, size, ["sh", "-c", f"{shlex.join(map(str, compile_))} >&2"])
        assert "Traceback" not in errors
        if code == 0:
            assert there[-1] == "p"
            continue
        assert (code, there) == (1, []), (size, errors)
        assert "error: can't write p: its disk " in errors
        assert "free, and the package's weights alone take" in " ".join(errors.split())


def test_files_on_a_disk_that_gets_full(decoder: Path, package: Path, tmp_path: Path) -> None:
    if not is_possible():
        pytest.skip("no file systems of one's own here")
    save_arrays(tmp_path / "x.npz", decoder_feeds())
    (tmp_path / "disk").mkdir()
    commands = [
        ["run", package, "--inputs", tmp_path / "x.npz", "--outputs", "out.npz"],
        ["plan", decoder, "-d", "cpu0", "-o", "plan.json"],
        ["bench", package, "--runs", "5", "--no-memory", "--trace", "trace.json"],
    ]
    filled = f"head -c 4096 /dev/zero > other; {shlex.join(several(commands))} >&2"
    code, printed, there = on_small_disk(tmp_path / "disk", 4, ["sh", "-c", filled])
    assert (code, there) == (0, ["other"]), printed
    for command, found in zip(commands, results(printed), strict=True):
        said = f"error: can't write {command[-1]}: the disk is full (No space left on device), with"
        assert found.returncode == 1 and said in found.stderr


def test_reader_that_ends_does_not_stop_a_compile(write_model: Callable[[str], Path], tmp_path: Path) -> None:
    model = write_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[n] x) => (float[n] y) { a = Relu(x) y = Neg(a) }'
    )
    command = f"set -o pipefail; {SCRIPT} compile {model} -d 2xcpu --split-mode layer -o {tmp_path}/p | true"
    shell(command, 0)
    splitc("inspect", tmp_path / "p")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_terminals_that_lack_characters(package: Path, encoding: str) -> None:
    shown = shell(f"{SCRIPT} bench {package} --runs 1 --warmup 0 --no-memory", 0, encoding, PYTHONIOENCODING=encoding)
    assert "#" in shown


@pytest.mark.parametrize("delay", [0.1, 0.7])
def test_interrupt_at_any_moment_is_one_line(decoder: Path, tmp_path: Path, delay: float) -> None:
    """Also while Python imports what a command needs."""
    program = "import sys, splitc.runtime.__main__ as it; print(flush=True); sys.argv[0] = 'splitc'; it.main()"
    arguments = ["compile", str(decoder), "-d", "2xcpu", "-o", str(tmp_path / "p"), "--split-mode", "tensor"]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=listen_to_interrupts,
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (errors, process.returncode) == ("error: interrupted\n", 130)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root may read and write everything")
def test_folders_without_rights(decoder: Path, package: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        result = splitc("compile", decoder, "-d", "cpu0", "-o", tmp_path / "p", code=2)
        assert "Permission denied" in result.stderr
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root may read and write everything")
def test_data_without_rights(decoder: Path, package: Path, tmp_path: Path) -> None:
    """ONNX Runtime's error for a system error depends on its number: 13 becomes one about models to be compiled."""
    shutil.copytree(package, tmp_path / "p")
    for path in (decoder, decoder.with_name(f"{decoder.name}.data")):
        shutil.copy(path, tmp_path)
    for path in (tmp_path / f"{decoder.name}.data", *tmp_path.glob("p/rank0/*.weights")):
        path.chmod(0)
    assert "Permission denied" in splitc("plan", tmp_path / decoder.name, "-d", "cpu0", code=1).stderr
    for command in (["bench", tmp_path / "p"], ["check", package, "--model", tmp_path / decoder.name]):
        assert "ONNX Runtime can't load" in splitc(*command, "--verify", "never", code=1).stderr


def test_every_error_of_onnx_runtime_is_known() -> None:
    kinds = [each for each in vars(ort_errors).values() if isinstance(each, type) and issubclass(each, Exception)]
    assert len(kinds) > 10
    assert all(issubclass(each, ERRORS) for each in kinds)


def test_working_folder_that_is_gone(decoder: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    said = shell(f"mkdir {gone}; cd {gone}; rmdir {gone}; {SCRIPT} plan {decoder} -d cpu0 -o plan.json", 1)
    assert "No such file or directory" in said


def test_programs_in_the_working_folder_are_not_run(decoder: Path, tmp_path: Path) -> None:
    package = compile_mode(decoder, "one device")
    for name in ("msgspec", "numpy", "onnx", "splitc"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this is not yours to run')")
    for command in (["check", package, "--model", decoder], ["bench", package, "--runs", "1", "--ranks", "processes"]):
        splitc_process(*command, cwd=tmp_path)


def test_what_the_system_raises_is_explained() -> None:
    for error, text in (
        (FileNotFoundError(2, "No such file or directory", "a.npz"), "a.npz: No such file or directory"),
        (OSError(18, "Invalid cross-device link", "a", None, "b"), "a: b: Invalid cross-device link"),
        (
            MemoryError("Unable to allocate 4 TiB"),
            "there is not enough memory on this machine: Unable to allocate 4 TiB",
        ),
        (
            RuntimeError("can't start new thread"),
            "this process may start no more threads: raise the limit of processes (ulimit -u, or the container's), or "
            "give devices fewer threads with --threads",
        ),
        (KeyboardInterrupt(), "interrupted"),
        (MisuseError("as it is"), "as it is"),
    ):
        assert str(explained(error)) == text
    files = explained(OSError(errno.EMFILE, "Too many open files", "weights"))
    assert "may have no more open files: raise their limit (ulimit -n)" in str(files)
    assert explained(KeyError("a bug")) is None


@pytest.mark.skipif(sys.platform == "darwin", reason="names of files are UTF-8 there")
@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_package_in_a_folder_whose_name_is_no_utf_8(decoder: Path, tmp_path: Path, ranks: str) -> None:
    copied = shutil.copytree(compile_mode(decoder, "one device"), tmp_path / os.fsdecode(b"p\xff"))
    shown = shell(f"{SCRIPT} bench {os.fsdecode(os.fsencode(copied))} --runs 1 --no-memory --ranks {ranks}", 1)
    assert "not UTF-8" in shown
