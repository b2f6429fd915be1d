"""Run the command `splitc`: in this process, in a new one, or several times in one new process.

python tests/helpers/command.py '[["inspect", "package"], ["devices", "--json"]]'
"""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

SCRIPT = str(Path(sys.executable).with_name("splitc"))
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Result:
    """How a command ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def splitc(*arguments: object, code: int = 0) -> Result:
    """Run splitc in this process. It must end with `code`, without a traceback."""
    return _check(_run([str(each) for each in arguments]), code)


def splitc_any(*arguments: object) -> Result:
    """As `splitc`, with any exit code."""
    return _run([str(each) for each in arguments])


def splitc_process(*arguments: object, code: int = 0, start: Sequence[str] = (SCRIPT,), **options: object) -> Result:
    """As `splitc`, in a new process. The options are those of subprocess.run."""
    command = [*start, *map(str, arguments)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, **options)  # type: ignore[call-overload]
    return _check(Result(found.returncode, found.stdout, found.stderr), code)


def splitc_several(commands: Sequence[Sequence[object]], env: Mapping[str, str]) -> list[Result]:
    """Run several commands, one after the other, in one new process with this environment."""
    found = subprocess.run(several(commands), capture_output=True, text=True, timeout=120, env=dict(env), cwd=ROOT)
    assert found.returncode == 0, found.stderr
    return results(found.stdout)


def several(commands: Sequence[Sequence[object]]) -> list[str]:
    """The command line of a process that runs these commands, and prints what `results` reads."""
    return [sys.executable, __file__, json.dumps([[str(each) for each in command] for command in commands])]


def results(printed: str) -> list[Result]:
    """The results of several commands, read from what the process printed."""
    return [Result(*each) for each in json.loads(printed)]


def _check(result: Result, code: int) -> Result:
    assert "Traceback" not in result.stderr
    assert result.returncode == code, result.stderr
    return result


def _run(arguments: Sequence[str]) -> Result:
    from splitc.runtime.__main__ import main

    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    before, handler = sys.argv, signal.getsignal(signal.SIGTERM)
    sys.argv = ["splitc", *arguments]
    code = 0
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    finally:
        sys.argv = before
        signal.signal(signal.SIGTERM, handler)
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
    return Result(code, *texts)


if __name__ == "__main__":
    found = [_run(arguments) for arguments in json.loads(sys.argv[1])]
    print(json.dumps([(each.returncode, each.stdout, each.stderr) for each in found]))
